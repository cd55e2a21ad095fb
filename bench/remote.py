"""What the benchmarks share: one process for each variant, and the facts of the machine."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch


def _serve(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Answers (method, arguments) with (ok, result) until None comes."""
    warnings.filterwarnings("ignore", message=".*Disabling autocast")  # the vendor asks for a float32 autocast
    worker: Any = None
    while (request := connection.recv()) is not None:
        method, given = request
        try:
            worker = worker or make(*arguments)
            with contextlib.redirect_stdout(sys.stderr):
                connection.send((True, getattr(worker, method)(*given)))
        except Exception as error:
            traceback.print_exc()
            connection.send((False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"))


class Remote:
    """The parent's end of a process that makes one object, at the first request, and answers with its methods."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> None:
        self._connection.send((method, arguments))

    def answer(self) -> Any:
        """Raises RuntimeError with the worker's own message, also when its process has died."""
        try:
            ok, result = self._connection.recv()
        except EOFError:
            self._process.join()
            ok, result = False, f"the process ended with code {self._process.exitcode}"
        if not ok:
            raise RuntimeError(result)
        return result

    def call(self, method: str, *arguments: Any) -> Any:
        self.ask(method, *arguments)
        return self.answer()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(timeout=30)


@contextlib.contextmanager
def machine(*, alone: bool) -> Iterator[None]:
    """Benchmarks started side by side share the machine while they warm up and compare, and time one at a time.

    Nothing is timed (`alone=True`) while another benchmark does anything but wait for its own turn to.
    """
    with open(os.path.join(tempfile.gettempdir(), "cadence-bench.lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def environment(device: str) -> dict[str, str]:
    on_gpu = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else "none",
        "torch": torch.__version__,
        "commit": os.environ.get("CADENCE_COMMIT")
        or _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
    }


def result_path(out: Path, *words: str) -> Path:
    """The file for a result, named after the words that are not empty; its folder is made."""
    out.mkdir(parents=True, exist_ok=True)
    return out / ("_".join(re.sub(r"[^a-z0-9]+", "_", word.lower()) for word in words if word) + ".json")


def spread(times: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and ends of milliseconds, at least two of them."""
    ordered = sorted(times)
    low, _, high = statistics.quantiles(ordered, n=4)
    return {
        "median_ms": round(statistics.median(ordered), 3),
        "p95_ms": round(ordered[int(0.95 * (len(ordered) - 1))], 3),
        "iqr_ms": round(high - low, 3),
        "min_ms": round(ordered[0], 3),
        "max_ms": round(ordered[-1], 3),
        "repeats": len(ordered),
    }


def verdict(row: dict[str, Any]) -> str:
    """How a line about a variant ends: whether its bytes are eager's (a dash where that cannot be told), and what it
    missed."""
    equal = {True: "equal ", False: "DIFFER", None: "-     "}[row["bytes_equal"]]
    return f"  {equal}  {row['misses'] or 'none'}"
