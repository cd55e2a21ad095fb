"""From what `torch.compile` returned to the program behind it."""

from __future__ import annotations

from typing import Any

from cadence_fx._torch import CompileSite, compile_wrapper_of, module_of, original_of
from cadence_fx.backend import contract_of
from cadence_fx.errors import NotCompiled
from cadence_fx.program import Program


def program_of(compiled: Any, verb: str) -> Program:
    """The program behind what `torch.compile` returned; made now if nothing has been compiled yet.

    Raises:
        NotCompiled: not compiled, or with another backend.
    """
    wrapper = compile_wrapper_of(compiled)
    if wrapper is None or getattr(wrapper.compiler_fn, "__name__", "") != "cadence":
        raise NotCompiled(verb, compiled)
    module = module_of(original_of(compiled))
    site = CompileSite(wrapper=wrapper, module=module)
    options = wrapper.kwargs.get("options")
    return Program.of(site, options, contract_of(site, options))
