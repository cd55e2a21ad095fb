"""Imports the vendor packages: without their `__init__`, without what the decoder never calls, and both at once.

A package imports its tokenizer, speaker model and audio loaders when it is imported. None of that is needed to run the
decoder, so its submodules are imported without the package's `__init__`, with placeholder modules where an optional
import is missing (only while importing).

Two packages install a top-level `stepaudio2`, two a top-level `moshi`, and one a top-level `models`, as many do. The
second one of each pair and the last are imported under names of their own: their modules' absolute imports are renamed
as they are compiled, and nothing else in them is.

A package is looked for on `sys.path`, then in `vendor/<distribution>` of the environment, then in `.vendor/` of this
repository, unpacked there itself or in a folder of the distribution's name. One that is on no index is looked for in
the checkout that an environment variable names, and nowhere else.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import math
import os
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo

FOLDER = "stepaudio2"
_UNPACKAGED = ("cosyvoice2", "flashcosyvoice")  # folders that a checkout imports from its own path
_REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Package:
    """A published package: its name on the index, its version, and what its top-level folder is imported as."""

    distribution: str
    version: str
    name: str
    top: str  # the folder that it installs
    has: str  # what tells that folder from others of its name: something in it,
    lacks: str | None = None  # and something that is not
    checkout: str | None = None  # the environment variable that names a clone of its repository; it is on no index

    def _roots(self) -> list[Path]:
        if self.checkout is not None:
            named = os.environ.get(self.checkout)
            return [Path(named), Path(named, self.top)] if named else []
        vendored = [Path(sys.prefix, "vendor", self.distribution), _REPOSITORY / ".vendor"]
        return [*map(Path, sys.path), *vendored, _REPOSITORY / ".vendor" / self.distribution]

    def folder(self) -> Path | None:
        """Where its top-level folder is, None when it is not installed."""
        for root in self._roots():
            found = root / self.top
            if (found / self.has).exists() and not (self.lacks and (found / self.lacks).exists()):
                return found
        return None


STEPAUDIO2 = Package("stepaudio2-minicpmo", "0.1.1", FOLDER, FOLDER, has="token2wav.py", lacks="causal_vocoder")
MINICPMO_UTILS = Package("minicpmo-utils", "1.0.7", "minicpmo_utils_stepaudio2", FOLDER, has="causal_vocoder")
LYCHEE_FD = Package(
    "Lychee-FD", "7bb1068", "lychee_fd_step_audio2", "third_party/Step-Audio2", has="token2wav.py",
    checkout="CADENCE_LYCHEE_FD",
)  # fmt: skip
MOSHI = Package("moshi", "0.2.13", "moshi", "moshi", has="conditioners")
PERSONAPLEX = Package(
    "moshi-personaplex", "0.1.0", "personaplex_moshi", "moshi", has="offline.py", lacks="conditioners",
    checkout="CADENCE_PERSONAPLEX",
)  # fmt: skip
# One folder of it, under a name of its own: the packages around it import a serving engine.
VLLM_OMNI = Package(
    "vllm-omni", "0.30.0", "vllm_omni_minicpmo", "vllm_omni/model_executor/models/minicpmo_4_5", has="pipeline.py"
)
FREEZE_OMNI = Package(
    "Freeze-Omni", "3e17af4", "freeze_omni_models", "models", has="decoder/ticodec", checkout="CADENCE_FREEZE_OMNI"
)


def _get_window(name: str, length: int, fftbins: bool = True) -> np.ndarray:
    """scipy's periodic Hann window, the only one that the vocoders ask for."""
    if name != "hann" or not fftbins:
        raise ValueError(f"only the periodic hann window is available without scipy, not {name!r}")
    return np.asarray([0.5 - 0.5 * math.cos(2 * math.pi * i / length) for i in range(length)])


class _Platform:
    """The part of vLLM's that a capture asks for: one pool for all graphs of the process."""

    pool: Any = None

    @classmethod
    def get_global_graph_pool(cls) -> Any:
        cls.pool = cls.pool or torch.cuda.graph_pool_handle()
        return cls.pool


# What the vendors import but the decoders never call; get_window, the logger and the pool apart.
_OPTIONAL: dict[str, dict[str, Any]] = {
    "onnxruntime": {},
    "torchaudio": {},
    "torchaudio.compliance": {},
    "torchaudio.compliance.kaldi": {},
    "s3tokenizer": {},
    "yaml": {},
    "hyperpyyaml": {"load_hyperpyyaml": None},
    "soundfile": {},
    "librosa": {},
    "librosa.filters": {"mel": None},
    "scipy": {},
    "scipy.signal": {"get_window": _get_window},
    "scipy.io": {},
    "scipy.io.wavfile": {"read": None},
    "huggingface_hub": {"hf_hub_download": None},
    "huggingface_hub.errors": {"EntryNotFoundError": LookupError},
    "safetensors": {},
    "safetensors.torch": {"load_file": None, "load_model": None, "save_file": None},
    "sentencepiece": {"SentencePieceProcessor": None},
    "sphn": {},
    "tqdm": {},
    "tqdm.auto": {"tqdm": None},
    "vllm": {},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.platforms": {"current_platform": _Platform},
    "transformers": {"LlamaConfig": None},
    "transformers.cache_utils": {"DynamicCache": None},
    "transformers.models": {},
    "transformers.models.llama": {},
    "transformers.models.llama.modeling_llama": dict.fromkeys(
        ("LlamaDecoderLayer", "LlamaRMSNorm", "LlamaRotaryEmbedding")
    ),
}


def available(package: Package = STEPAUDIO2) -> bool:
    """Whether the vendor package and `einops`, which all of them run on, can be imported."""
    return package.folder() is not None and importlib.util.find_spec("einops") is not None


@contextlib.contextmanager
def _placeholders() -> Iterator[None]:
    """Stand-ins for missing optional modules; gone from `sys.modules` afterwards, so that nobody else finds them."""
    roots = {name.partition(".")[0] for name in _OPTIONAL}
    missing = {root for root in roots if root not in sys.modules and importlib.util.find_spec(root) is None}
    added: list[str] = []
    for name, attributes in _OPTIONAL.items():
        if name.partition(".")[0] not in missing:
            continue
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update(attributes)
        sys.modules[name] = module
        added.append(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


@contextlib.contextmanager
def _dynamo_config_kept() -> Iterator[None]:
    """The vendor's encoder sets two global Dynamo options when imported; a test run must not inherit them."""
    config = torch._dynamo.config
    kept = config.suppress_errors, config.cache_size_limit
    try:
        yield
    finally:
        config.suppress_errors, config.cache_size_limit = kept


@contextlib.contextmanager
def _nothing_compiled() -> Iterator[None]:
    """`moshi` decides while it is imported whether Inductor compiles two of its functions on a GPU. Here they are left
    eager, as they are elsewhere, and that is what bytes are compared with; unless the variable is set already, to
    whatever it is."""
    if "NO_TORCH_COMPILE" in os.environ:
        yield
        return
    os.environ["NO_TORCH_COMPILE"] = "1"
    try:
        yield
    finally:
        del os.environ["NO_TORCH_COMPILE"]


_tops: dict[str, str] = {}  # name of a renamed package -> the name that its modules know it by


class _RenamingLoader(importlib.machinery.SourceFileLoader):
    """Compiles a module of a renamed package: `from stepaudio2.x import y` becomes an import from its own name, and so
    does `from cosyvoice2.x import y` in a checkout that is on nobody's path."""

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        name = fullname.partition(".")[0]
        top = _tops[name]
        tree = ast.parse(self.get_data(path), path)
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.module or node.level:
                continue
            if (first := node.module.partition(".")[0]) == top:
                node.module = name + node.module[len(top) :]
            elif first in _UNPACKAGED:
                node.module = f"{name}.{node.module}"
        return compile(tree, path, "exec")  # never from or into the cache, which is keyed by path alone


class _RenamingFinder(importlib.abc.MetaPathFinder):
    """Finds the submodules of one renamed package."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if path is None or not fullname.startswith(f"{self._name}."):
            return None
        finders = (importlib.machinery.FileFinder(folder, (_RenamingLoader, [".py"])) for folder in path)
        return next((spec for finder in finders if (spec := finder.find_spec(fullname))), None)


def load(module: str, package: Package = STEPAUDIO2) -> types.ModuleType:
    """Imports `<module>` of a package without running the package's `__init__`.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    folder = package.folder()
    if folder is None:
        remedy = f"pip install --no-deps {package.distribution}=={package.version}"
        if package.checkout is not None:
            remedy = f"{package.checkout} names no checkout of {package.distribution}"
        raise ModuleNotFoundError(f"{package.top} is not importable: {remedy}")
    if package.name not in sys.modules:
        root = types.ModuleType(package.name)
        root.__path__ = [str(folder)]
        root.__version__ = package.version  # type: ignore[attr-defined]
        sys.modules[package.name] = root
        if package.name != package.top:
            _tops[package.name] = package.top
            sys.meta_path.insert(0, _RenamingFinder(package.name))
    with _dynamo_config_kept(), _nothing_compiled(), _placeholders():
        return importlib.import_module(f"{package.name}.{module}")
