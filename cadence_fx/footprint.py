"""What a tensor weighs: its sizes, its dtype, and what the stock code allocates for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass

from cadence_fx._region import Region
from cadence_fx._units import counted
from cadence_fx.clock import check_count
from cadence_fx.errors import ContractError, unknown_name

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8,
    "complex128": 16, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
MAX_SIZE = 1 << 62
MAX_DIMENSIONS = 64


def countable(number: int, field: str, region: str | None = None) -> int:
    """``number``, unless no machine counts so far; estimates and pictures are in floating point."""
    if number > MAX_SIZE:
        raise ContractError(f"comes to more than {MAX_SIZE:,}", field=field, region=region)
    return number


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes of a region or of an argument (paper section 3.1: the element width times the product of extents).

    * ``shape``: the size of each axis; an axis that follows a clock has that clock's name in its place.
    * ``dtype``: as PyTorch writes it, without ``torch.``
    * ``stock``: the shape that the code as shipped allocates, in numbers; None where it allocates what is attended.
    * ``instances``: how many there are of it, such as one a layer for a region whose accessor has a ``*``.

    Raises ContractError, naming the field.
    """

    shape: tuple[int | str, ...]
    dtype: str = "float32"
    _: KW_ONLY
    stock: tuple[int, ...] | None = None
    instances: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", self._sizes(self.shape, "shape"))
        if self.stock is not None:
            object.__setattr__(self, "stock", self._sizes(self.stock, "stock"))
            named = [size for size in self.stock if isinstance(size, str)]
            if named:
                raise ContractError(f"what is allocated is a number, found {named[0]!r}", field="stock")
        if not isinstance(self.dtype, str) or self.dtype not in ITEM_BYTES:
            raise ContractError(unknown_name("dtype", str(self.dtype)[:40], list(ITEM_BYTES)), field="dtype")
        countable(check_count(self.instances, "instances", least=1), "instances")
        countable(self.stock_bytes or 0, "stock")

    @staticmethod
    def _sizes(values: object, field: str) -> tuple[int | str, ...]:
        if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
            raise ContractError(f"expected sizes in a list, found {str(values)[:80]!r}", field=field)
        sizes = tuple(values)
        if len(sizes) > MAX_DIMENSIONS:
            raise ContractError(f"a tensor has at most {MAX_DIMENSIONS} axes, found {len(sizes)}", field=field)
        for size in sizes:
            if isinstance(size, str):
                continue
            countable(check_count(size, field, least=0), field)
        return sizes

    def check(self, named: Mapping[int, str], region: str | None = None) -> None:
        """ContractError unless exactly the axes ``named`` have the names of these clocks."""
        rank = len(self.shape)
        expected: dict[int, str] = {}
        for axis, clock in named.items():
            if not -rank <= axis < rank:
                has = counted(rank, "axis")
                raise ContractError(f"axis {axis} follows {clock!r}, and the shape has {has}", field="shape",
                                    region=region)  # fmt: skip
            expected[axis % rank] = clock
        for axis, size in enumerate(self.shape):
            if size != expected.get(axis, size) or (isinstance(size, str) and axis not in expected):
                wanted = repr(expected[axis]) if axis in expected else "a number"
                raise ContractError(f"axis {axis}: expected {wanted}, found {size!r}", field="shape", region=region)

    def nbytes(self, sizes: Mapping[int, int], region: str | None = None) -> int:
        """Bytes of all instances, with ``sizes`` of the axes that follow clocks; ContractError beyond all counting."""
        rank = len(self.shape)
        known = {axis % rank: size for axis, size in sizes.items()}
        count = math.prod(size if isinstance(size, int) else known[axis] for axis, size in enumerate(self.shape))
        return countable(count * ITEM_BYTES[self.dtype] * self.instances, "shape", region)

    @property
    def stock_bytes(self) -> int | None:
        """Bytes that the code as shipped allocates, None where it allocates nothing beforehand."""
        if self.stock is None:
            return None
        return math.prod(self.stock) * ITEM_BYTES[self.dtype] * self.instances


def region_axes(region: Region) -> dict[int, str]:
    """The axes of a region that follow clocks, and which ones."""
    return dict(zip(region.axes, region.clocks, strict=True))
