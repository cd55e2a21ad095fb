"""Sources of random numbers are read, put back and compared, whoever they belong to."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from cadence_fx.generators import Generators, all_sources, device_sources, explicit, of_numpy, of_python

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[], object]] = {
    "torch's CPU generator": lambda: torch.rand(1),
    "Python's random module": random.random,
    "numpy's global state": lambda: np.random.normal(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_seen_and_undone(name: str) -> None:
    generators = Generators(all_sources())
    assert generators.moved() == []
    first = DRAWS[name]()
    assert [source.name for source in generators.moved()] == [name]
    generators.restore()
    assert generators.moved() == []
    assert DRAWS[name]() == first


def test_numpys_second_normal_number_is_part_of_its_state() -> None:
    """One draw makes two numbers and keeps the other one."""
    np.random.normal()
    generators = Generators(all_sources())
    second = np.random.normal()
    generators.restore()
    assert np.random.normal() == second


def test_sources_that_somebody_made() -> None:
    dice, numbers, old = random.Random(3), np.random.default_rng(3), np.random.RandomState(3)
    mine = torch.Generator().manual_seed(3)
    draws = (dice.random, numbers.random, old.random_sample, lambda: float(torch.rand(1, generator=mine)))
    generators = Generators([of_python(dice, "dice"), of_numpy(numbers, "numbers"), of_numpy(old, "old")])
    generators = Generators([*generators.sources, *explicit([mine])])
    first = [draw() for draw in draws]
    assert len(generators.moved()) == 4
    generators.restore()
    assert [draw() for draw in draws] == first


def test_one_generator_named_twice_counts_once() -> None:
    mine = torch.Generator()
    generators = Generators([*device_sources(CPU), *explicit([mine, torch.default_generator, mine])])
    assert generators.of(CPU) == [torch.default_generator, mine]


def test_whose_device_a_source_is_of() -> None:
    (cpu,) = device_sources(CPU)
    assert cpu.is_of(CPU) and not cpu.is_of(torch.device("cuda", 0))
    assert not of_python(random, "random").is_of(CPU)


def test_a_seed_is_a_change_even_where_nothing_is_drawn() -> None:
    generators = Generators(all_sources())
    torch.default_generator.manual_seed(1234)
    assert [source.name for source in generators.moved()] == ["torch's CPU generator"]
