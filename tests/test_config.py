from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawbar.config import (
    ACCEPTANCE_RULES,
    GREEDY_TEMPERATURE,
    PRESETS,
    SamplingParams,
    SpeculationConfig,
    format_bytes,
    parse_bytes,
)
from drawbar.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("3GiB", 3 * 2**30),
        ("3GB", 3 * 10**9),
        ("3G", 3 * 2**30),
        ("3gib", 3 * 2**30),
        ("512 MiB", 512 * 2**20),
        (" 512MB ", 512 * 10**6),
        ("64KiB", 64 * 2**10),
        ("64kB", 64_000),
        ("2TiB", 2 * 2**40),
        ("2TB", 2 * 10**12),
        ("1.5GiB", 3 * 2**29),
        ("0.1GB", 10**8),
        ("100B", 100),
        ("1073741824", 2**30),
        (1073741824, 2**30),
        (10**16 + 1, 10**16 + 1),
        ("1.000000000000000001TB", 10**12),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "-1",
        "-1GiB",
        "+1GiB",
        "3 apples",
        "3 G B",
        "GiB",
        "0",
        "0GiB",
        "0.4B",
        "nan",
        "inf",
        "1e9",
        "1_000",
        "1,5GiB",
        ".5GiB",
        "3GiB 3GiB",
        "٣GiB",
        "9" * 400,
        "9" * 5000,
        "0." + "3" * 5000,
        True,
        None,
        math.inf,
    ],
)
def test_what_is_not_a_size_is_refused(text: Any) -> None:
    with pytest.raises(ConfigurationError, match="memory size"):
        parse_bytes(text)


@given(st.integers(1, 2**63))
def test_plain_bytes_are_exact(size: int) -> None:
    assert parse_bytes(size) == parse_bytes(str(size)) == parse_bytes(f"{size} B") == size


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_named_error(text: str) -> None:
    try:
        assert parse_bytes(text) > 0
    except ConfigurationError as error:
        assert repr(text) in str(error)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1.5 * 2**20, "1.5 MiB"),
        (3 * 2**30, "3 GiB"),
        (2**41, "2.05e+03 GiB"),
    ],
)
def test_sizes_for_people(size: float, text: str) -> None:
    assert format_bytes(size) == text


NOT_NUMBERS = [math.nan, math.inf, -math.inf, "1", "x", [], True]
NOT_WHOLE = [*NOT_NUMBERS, 1.5, 2.0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (*NOT_NUMBERS, None, -1e-9)],
        *[("top_k", value) for value in (*NOT_WHOLE, 0, -1)],
        *[("top_p", value) for value in (*NOT_NUMBERS, 0, -0.1, 1.0001)],
        *[("min_p", value) for value in (*NOT_NUMBERS, -0.1, 1.0001)],
        *[("seed", value) for value in (*NOT_WHOLE, -1, 2**64)],
    ],
)
def test_bad_sampling_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{field} .*{re.escape(repr(value))}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            (name, value)
            for name in ("tree_size", "tree_width", "tree_depth", "branching")
            for value in (*NOT_WHOLE, None, 0, -1)
        ],
        *[("acceptance", value) for value in ("", "Exact", "lossy", None, ["exact"])],
        *[("draft_temperature", value) for value in (*NOT_NUMBERS, -1e-9)],
        *[("min_gain", value) for value in (*NOT_NUMBERS, None, -1e-9)],
    ],
)
def test_bad_speculation_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{field} .*{re.escape(repr(value))}"):
        SpeculationConfig(**{field: value})


@pytest.mark.parametrize("value", [*NOT_NUMBERS, 0, -0.1, 1.0001])
def test_a_bad_threshold_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"^acceptance_threshold .*{re.escape(repr(value))}"):
        SpeculationConfig(acceptance="threshold", acceptance_threshold=value)


def test_a_threshold_goes_with_its_rule_alone() -> None:
    alone: list[dict[str, Any]] = [{"acceptance": "threshold"}, {"acceptance_threshold": 0.5}]
    for settings in alone:
        with pytest.raises(ConfigurationError, match="acceptance_threshold"):
            SpeculationConfig(**settings)
    with pytest.raises(ConfigurationError, match="acceptance_threshold"):
        SpeculationConfig(acceptance="rejection", acceptance_threshold=0.5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0, "top_k": 1, "top_p": 1, "min_p": 0, "seed": 0},
        {"temperature": 10**400, "top_k": 10**9, "top_p": 1e-9, "min_p": 1.0, "seed": 2**64 - 1},
        {"temperature": np.float32(0.5), "top_k": np.int64(4), "seed": np.uint64(2**64 - 1)},
    ],
)
def test_the_limits_are_allowed(settings: dict[str, Any]) -> None:
    params = SamplingParams(**settings)
    assert all(getattr(params, name) == value for name, value in settings.items())


def test_greedy_is_a_temperature_next_to_zero() -> None:
    assert SamplingParams().greedy
    assert SamplingParams(1e-6).greedy
    assert not SamplingParams(GREEDY_TEMPERATURE).greedy
    assert not SamplingParams(1.0).greedy


def test_settings_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        SpeculationConfig().tree_size = 1  # type: ignore[misc]


def test_presets_by_name_are_lossless_trees_that_grow() -> None:
    assert sorted(PRESETS) == ["default", "fast", "quality"]
    presets = {name: make() for name, make in PRESETS.items()}
    for preset in presets.values():
        assert preset.lossless
        assert preset.acceptance == "exact"
        assert preset.acceptance_threshold is None
        assert preset.tree_width > 1 and preset.branching > 1
        assert preset.tree_size > preset.tree_depth
    for name in ("tree_size", "tree_width", "tree_depth", "branching"):
        sizes = [getattr(presets[preset], name) for preset in ("quality", "default", "fast")]
        assert sizes == sorted(set(sizes)), name


@pytest.mark.parametrize(
    ("preset", "length", "threshold"),
    [
        (SpeculationConfig.chain_default(), 5, 0.1),
        (SpeculationConfig.chain_fast(), 8, 0.05),
        (SpeculationConfig.chain_quality(), 4, 0.2),
    ],
)
def test_chain_presets_are_lossy_chains(preset: SpeculationConfig, length: int, threshold: float) -> None:
    assert (preset.tree_size, preset.tree_width, preset.tree_depth, preset.branching) == (length, 1, length, 1)
    assert preset.acceptance == "threshold"
    assert preset.acceptance_threshold == threshold
    assert preset.draft_temperature == 0.7
    assert not preset.lossless


def test_a_chain_takes_further_settings() -> None:
    chain = SpeculationConfig.chain(3, acceptance="rejection", draft_temperature=0.5)
    assert chain == SpeculationConfig(3, 1, 3, 1, acceptance="rejection", draft_temperature=0.5)
    with pytest.raises(ConfigurationError, match="tree_size"):
        SpeculationConfig.chain(0)


def test_only_the_threshold_rule_is_lossy() -> None:
    lossless = {
        rule: SpeculationConfig(acceptance=rule, acceptance_threshold=0.5 if rule == "threshold" else None).lossless
        for rule in ACCEPTANCE_RULES
    }
    assert lossless == {"exact": True, "rejection": True, "threshold": False}


@pytest.mark.parametrize("settings", [SamplingParams, SpeculationConfig])
def test_every_field_is_documented(settings: type) -> None:
    assert settings.__doc__ is not None
    for field in fields(settings):
        assert re.search(rf"^\s+{field.name}: ", settings.__doc__, re.MULTILINE), field.name
