"""Placement: what fits is held, nothing exceeds the budget, and refusals name what would do."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawbar.errors import BudgetError
from drawbar.planner import READ_AHEAD_SLOTS, LayerSize, Placement, place

MIB = 1 << 20
SIZES = st.builds(
    lambda staged, held, copied, part: LayerSize(staged, held, copied, round(part * (staged + copied))),
    st.integers(1, 900),
    st.integers(1, 900),
    st.integers(0, 300),
    st.floats(0, 1),
)
LAYERS = st.lists(SIZES, min_size=1, max_size=20)


def least(fixed: int, layers: list[LayerSize]) -> int:
    return fixed + max(layer.copied for layer in layers) + max(layer.staged for layer in layers)


@given(st.integers(0, 500), LAYERS, st.integers(0, 20_000))
def test_every_layer_has_a_place_and_the_total_is_within_the_budget(
    fixed: int, layers: list[LayerSize], extra: int
) -> None:
    budget = least(fixed, layers) + extra
    plan = place(budget, fixed, layers)
    assert sorted(plan.resident + plan.streamed) == list(range(len(layers)))
    assert plan.total <= budget
    held = sum(layers[index].held for index in plan.resident)
    if plan.streamed:
        copied, largest = max(layer.copied for layer in layers), max(layer.staged for layer in layers)
        assert plan.total == fixed + held + copied + plan.slots * largest
        assert 1 <= plan.slots <= READ_AHEAD_SLOTS
        assert plan.bytes_per_pass == sum(layers[index].staged for index in plan.streamed)
        # While it is loaded, a resident layer takes more than it does later; the slots are not there yet.
        assert fixed + held + max(layer.loading for layer in layers) <= max(budget, fixed + held + copied + largest)
    else:
        assert (plan.slots, plan.bytes_per_pass) == (0, 0)
        assert plan.total == fixed + held + max(layer.loading for layer in layers)


@given(st.integers(0, 500), LAYERS)
def test_everything_is_resident_as_soon_as_it_fits(fixed: int, layers: list[LayerSize]) -> None:
    needed = fixed + sum(layer.held for layer in layers) + max(layer.loading for layer in layers)
    assert place(needed, fixed, layers).streamed == ()


@given(st.integers(0, 500), st.lists(st.integers(1, 900), min_size=1, max_size=20), st.integers(1, 400))
def test_too_small_a_budget_is_refused_with_a_size_that_works(fixed: int, staged: list[int], missing: int) -> None:
    # Streaming one layer must be the cheaper way here, so that the layers together do not fit either.
    layers = [LayerSize(size * MIB, 2 * size * MIB) for size in staged]
    needed = least(fixed, layers)
    with pytest.raises(BudgetError, match=r"too small for one layer") as caught:
        place(max(needed - missing, 0), fixed, layers)
    told = re.search(r"at least (\d+)MiB", str(caught.value))
    assert told
    assert place(int(told[1]) * MIB, fixed, layers).slots == 1 or len(layers) == 1
    assert int(told[1]) * MIB - needed < MIB


@given(st.integers(2, 100), st.integers(0, 100))
def test_what_is_held_is_spread_evenly(count: int, held: int) -> None:
    layers = [LayerSize(10, 10)] * count
    plan = place(min(held, count - 1) * 10 + 30, 0, layers)
    if not plan.streamed:
        return
    resident = plan.resident
    bounds = (-1, *resident, count)
    runs = [second - first - 1 for first, second in pairwise(bounds)]
    if len(resident) > 1:
        inner = runs[1:-1]
        assert max(inner) - min(inner) <= 1
        assert max(runs[0], runs[-1]) <= max(inner) + 1
    assert len(resident) == len(set(resident))


@given(LAYERS, st.integers(0, 5_000), st.integers(0, 5_000))
def test_more_memory_never_means_more_reading_with_equal_layers(
    layers: list[LayerSize], first: int, second: int
) -> None:
    equal = [LayerSize(layers[0].staged, layers[0].staged)] * len(layers)
    low, high = sorted((first, second))
    base = least(0, equal)

    def reading(plan: Placement) -> tuple[int, int]:
        return (-plan.slots if plan.streamed else -READ_AHEAD_SLOTS, plan.bytes_per_pass)

    assert reading(place(base + high, 0, equal)) <= reading(place(base + low, 0, equal))


def test_never_more_slots_than_layers() -> None:
    assert place(250, 0, [LayerSize(100, 300)]).slots == 1


def test_a_model_without_layers_needs_what_is_fixed() -> None:
    assert place(10, 10, []).total == 10
    with pytest.raises(BudgetError):
        place(9, 10, [])
