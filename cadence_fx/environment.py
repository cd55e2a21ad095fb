"""Where the process runs: versions, device, switches for repeatable results, and Dynamo's flags that matter here."""

from __future__ import annotations

import dataclasses
import os
import platform
from importlib import metadata
from typing import Any

import torch

from cadence_fx._torch import dynamo_flags
from cadence_fx._torch_switches import Determinism
from cadence_fx.determinism import REPEATABLE, VARIABLE
from cadence_fx.switch import is_off

# The releases that the package is tested with; the upper ends are exclusive.
SUPPORTED = {"python": ((3, 11), (3, 13)), "torch": ((2, 11), (2, 15))}
# Name -> the value that is right, or the smallest one, where there is one; and a remedy.
_FLAGS: dict[str, tuple[Any, str]] = {
    "suppress_errors": (False, "an error of compiling runs eager, uncounted: set it to False"),
    "disable": (False, "nothing is compiled: set it to False"),
    "recompile_limit": (8, "further graphs of one function run eager, uncounted: keep it at 8 or above"),
    "accumulated_recompile_limit": (256, "further graphs run eager, uncounted: keep it at 256 or above"),
    "allow_unspec_int_on_nn_module": (None, "a counter on a module compiles anew at each step unless it is True"),
    "capture_scalar_outputs": (None, "without it, .item() breaks a graph"),
    "assume_static_by_default": (True, "without it, sizes become symbols at once"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Something about the process that is in the way. `stops`: of every capture."""

    what: str
    remedy: str
    stops: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Environment:
    """What `facts_now` has found: figures by name, and what is wrong with them."""

    facts: dict[str, dict[str, Any]]
    problems: tuple[Problem, ...]


def environment() -> Environment:
    """The environment as it is. Asks no GPU for memory; starts CUDA only to read the name and size of the device."""
    versions = {
        "cadence-fx": _version("cadence-fx"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sympy": _version("sympy"),
        "numpy": _version("numpy"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "driver": _driver(),
    }
    found = Determinism.now()
    switches = dataclasses.asdict(found) | {VARIABLE: os.environ.get(VARIABLE), "kill switch": is_off()}
    flags = dynamo_flags(_FLAGS)
    facts: dict[str, dict[str, Any]] = {
        "versions": versions,
        "supported": {name: f">= {_dotted(low)}, < {_dotted(high)}" for name, (low, high) in SUPPORTED.items()},
        "device": _device(),
        "determinism": switches,
        "dynamo": flags,
    }
    return Environment(facts, (*_outdated(versions), *_set_wrong(switches), *_flagged(flags)))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The version of NVIDIA's kernel driver, as the system tells it."""
    try:
        with open("/sys/module/nvidia/version") as file:
            return file.read().strip()
    except OSError:
        return None


def _device() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"type": "cpu", "threads": torch.get_num_threads()}
    about = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "type": "cuda",
        "name": about.name,
        "count": torch.cuda.device_count(),
        "capability": f"{about.major}.{about.minor}",
        "memory": about.total_memory,
    }


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def _outdated(versions: dict[str, Any]) -> list[Problem]:
    return [
        Problem(f"{name} {versions[name]} is not tested", f"use {name} >= {_dotted(low)}, < {_dotted(high)}", False)
        for name, (low, high) in SUPPORTED.items()
        if not low <= _numbers(versions[name]) < high
    ]


def _set_wrong(switches: dict[str, Any]) -> list[Problem]:
    found = []
    if switches["kill switch"]:
        found.append(Problem("CADENCE_DISABLE is set: every call runs eager", "unset it", True))
    if switches["algorithms"] and torch.cuda.is_available() and switches[VARIABLE] not in REPEATABLE:
        what = f"deterministic algorithms are on and {VARIABLE} is {switches[VARIABLE]!r}"
        found.append(Problem(what, f"set {VARIABLE}={REPEATABLE[0]} before CUDA starts", True))
    if switches["benchmark"]:
        what = "cuDNN measures which algorithm is fastest: another process may take other kernels"
        found.append(Problem(what, "torch.backends.cudnn.benchmark = False", False))
    return found


def _flagged(flags: dict[str, Any]) -> list[Problem]:
    """Flags that keep calls from being compiled without anybody counting it."""
    found = []
    for name, value in flags.items():
        right, remedy = _FLAGS[name]
        wrong = value is not right if isinstance(right, bool) else right is not None and value < right
        if wrong:
            found.append(Problem(f"torch._dynamo.config.{name} is {value}", remedy, name == "disable"))
    return found
