"""Suite-wide setup: one thread, fixed seeds, a clean compiler around each test, and the `gpu` marker."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

# Tests share their cores with others: a slow example is no failure. A failing example prints what repeats it.
settings.register_profile("cadence", deadline=None, print_blob=True, max_examples=50)
settings.load_profile("cadence")

_NO_CUDA = "needs a CUDA device"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--torch-threads",
        type=int,
        default=1,
        help="threads for torch's CPU kernels; 0 leaves torch's own choice (default: 1)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if threads := config.getoption("--torch-threads"):
        torch.set_num_threads(threads)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=_NO_CUDA))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how much of the suite this machine could not run."""
    skipped = sum(_NO_CUDA in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ()))
    if skipped:
        terminalreporter.section("gpu")
        terminalreporter.line(f"{skipped} gpu tests were skipped: this machine has no CUDA device")


@pytest.fixture(autouse=True)
def _fresh_process_state() -> Iterator[None]:
    """Seeds every generator, and drops compiled code (and with it every carry) before and after the test.

    The reset is left out while nothing has loaded the compiler, so tests that need no torch.compile stay quick.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    grad = torch.is_grad_enabled()
    _reset_compiler()
    yield
    _reset_compiler()
    torch.set_grad_enabled(grad)
    # What autocast has cast of weights lives until the outermost context ends: one that is left open makes eager code
    # of later tests read weights of before.
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    assert depth == 0, f"the test has left {depth} autocast contexts open"


def _reset_compiler() -> None:
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
