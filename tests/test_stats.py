from __future__ import annotations

import re
from dataclasses import asdict, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawbar.stats import Stats

COUNTERS = [field.name for field in fields(Stats)]
COUNTS = [field.name for field in fields(Stats) if field.type == "int"]
SECONDS = [field.name for field in fields(Stats) if field.type == "float"]
RATES = ["tokens_per_pass", "acceptance_rate", "speedup", "net_speedup", "seconds_per_token"]

# Seconds in eighths, so that sums are exact.
counters = st.builds(
    Stats,
    **{name: st.integers(0, 10**12) for name in COUNTS},
    **{name: st.integers(0, 10**6).map(lambda eighths: eighths / 8) for name in SECONDS},
)


def test_every_counter_is_a_count_or_seconds() -> None:
    assert sorted(COUNTS + SECONDS) == sorted(COUNTERS)
    assert all(name.endswith("_s") for name in SECONDS)
    assert set(asdict(Stats()).values()) == {0}
    assert Stats.__doc__ is not None
    assert re.findall(r"^        (\w+): ", Stats.__doc__, re.MULTILINE) == COUNTERS


@given(counters, counters)
def test_counters_add(first: Stats, second: Stats) -> None:
    total = replace(first)
    total.add(second)
    for name in COUNTERS:
        assert getattr(total, name) == getattr(first, name) + getattr(second, name)
    assert total.since(first) == second
    assert total.since(second) == first
    assert first.since(first) == Stats()


def test_adding_leaves_the_other_as_it_was() -> None:
    first, second = Stats(tokens=1), Stats(tokens=2)
    first.add(second)
    assert second == Stats(tokens=2)
    first.add(first)
    assert first.tokens == 6


def test_rates_come_from_counters() -> None:
    stats = Stats(
        target_passes=4,
        tokens=20,
        accepted_tokens=15,
        rejected_tokens=5,
        prefill_s=2.0,
        verify_s=6.0,
        draft_s=2.0,
        total_s=10.0,
    )
    assert stats.tokens_per_pass == stats.speedup == 5.0
    assert stats.acceptance_rate == 0.75
    assert stats.net_speedup == 4.0
    assert stats.seconds_per_token == 0.5


def test_rates_follow_the_sums_and_not_the_mean_of_rates() -> None:
    total = Stats(target_passes=1, tokens=9)
    total.add(Stats(target_passes=9, tokens=11))
    assert total.tokens_per_pass == 2.0


@pytest.mark.parametrize("name", RATES)
def test_nothing_done_is_a_rate_of_zero(name: str) -> None:
    assert getattr(Stats(), name) == 0.0
    assert getattr(Stats(tokens=3, draft_s=1.0), name) == 0.0


@given(counters)
def test_drafting_never_speeds_up(stats: Stats) -> None:
    assert 0 <= stats.net_speedup <= stats.speedup
    assert 0 <= stats.acceptance_rate <= 1
    assert replace(stats, draft_s=0.0).net_speedup in (0.0, stats.speedup)


@given(counters)
def test_as_dict_holds_counters_and_rates(stats: Stats) -> None:
    values = stats.as_dict()
    assert list(values) == COUNTERS + RATES
    assert all(values[name] == getattr(stats, name) for name in values)
