"""Frozen settings: how to speculate, how to sample, how much memory to use.

Every default that the command line shows comes from here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from typing import Literal

from drawbar.errors import ConfigurationError

Acceptance = Literal["exact", "rejection", "threshold"]
ACCEPTANCE_RULES: tuple[Acceptance, ...] = ("exact", "rejection", "threshold")

# Below this temperature the noise, which spans about 40, bridges only logits that differ by less than 4e-4: in 16 bits
# these are tied or next to 0. What is left is the choice among tied tokens, which greedy makes by the lowest id.
GREEDY_TEMPERATURE = 1e-5

DEFAULT_MAX_NEW_TOKENS = 256
DEFAULT_ACCEPTANCE_THRESHOLD = 0.1

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[_letter] = 1024**_power


def parse_bytes(text: str | int) -> int:
    """Bytes in a size such as `3GiB`, `3GB`, `512 MiB` or `1073741824`.

    Raises:
        ConfigurationError: the text is not a size, or not positive.
    """
    match = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,40})?)\s*([A-Za-z]*)\s*", str(text))
    unit = match and _UNITS.get(match[2].upper())
    if not match or not unit:
        raise ConfigurationError(f"memory size {text!r} is not understood: write for example 3GiB, 3GB or 512MiB")
    size = int(Fraction(match[1]) * unit)
    if size <= 0:
        raise ConfigurationError(f"memory size {text!r} must be more than zero")
    return size


def format_bytes(size: float) -> str:
    """A size in binary units with three significant figures, for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def _is_number(value: object) -> bool:
    """Whether it is a finite number; True and False are none."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    return real and value == value and value not in (math.inf, -math.inf)


def _is_whole(value: object) -> bool:
    """Whether it is of an integer type; 2.0 is not, since transformers and `range` refuse it."""
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn from the target's logits.

    Attributes:
        temperature: 0 is greedy; values under 1e-5 are treated as 0.
        top_k: keep the k most likely tokens; None keeps all.
        top_p: keep the smallest set of tokens with at least this probability; None keeps all.
        min_p: keep tokens at least this fraction as likely as the likeliest; None keeps all.
        seed: keys the noise together with the position; None draws one, which is reported.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (_is_number(self.temperature) and self.temperature >= 0):
            raise ConfigurationError(f"temperature must be a finite number, 0 or more, not {self.temperature!r}")
        if self.top_k is not None and not (_is_whole(self.top_k) and self.top_k >= 1):
            raise ConfigurationError(f"top_k must be a whole number, 1 or more, not {self.top_k!r}")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ConfigurationError(f"top_p must lie above 0 and at most at 1, not {self.top_p!r}")
        if self.min_p is not None and not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise ConfigurationError(f"min_p must lie between 0 and 1, not {self.min_p!r}")
        if self.seed is not None and not (_is_whole(self.seed) and 0 <= self.seed < 2**64):
            raise ConfigurationError(f"seed must be a whole number between 0 and 2**64 - 1, not {self.seed!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How a round drafts, and by which rule the target accepts.

    Attributes:
        tree_size: drafted tokens that one pass verifies at the most.
        tree_width: nodes that one draft call expands at the most; 1 with `branching` 1 drafts a chain.
        tree_depth: longest drafted path.
        branching: children kept of an expanded node at the most.
        acceptance: `exact` (the target's own tokens, whatever the draft), `rejection` (speculative sampling:
            the target's own distribution) or `threshold` (lossy: what is likely enough is taken).
        acceptance_threshold: for `threshold`: accept a drafted token at least this fraction as likely, by the
            target, as the target's likeliest token.
        draft_temperature: temperature at which the draft's distribution is shaped; None is the sampling temperature.
        min_gain: tokens that a further draft call must be expected to add to the tree for growth to go on.
    """

    tree_size: int = 64
    tree_width: int = 8
    tree_depth: int = 16
    branching: int = 4
    acceptance: Acceptance = "exact"
    acceptance_threshold: float | None = None
    draft_temperature: float | None = None
    min_gain: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tree_size", "tree_width", "tree_depth", "branching"):
            value = getattr(self, name)
            if not (_is_whole(value) and value >= 1):
                raise ConfigurationError(
                    f"{name} must be a whole number, 1 or more, not {value!r} (draft='none' drafts nothing)"
                )
        if self.acceptance not in ACCEPTANCE_RULES:
            raise ConfigurationError(
                f"acceptance must be one of {', '.join(ACCEPTANCE_RULES)}, not {self.acceptance!r}"
            )
        if (self.acceptance == "threshold") != (self.acceptance_threshold is not None):
            raise ConfigurationError("acceptance_threshold goes with acceptance='threshold', and only with it")
        if self.acceptance_threshold is not None and not (
            _is_number(self.acceptance_threshold) and 0 < self.acceptance_threshold <= 1
        ):
            raise ConfigurationError(
                f"acceptance_threshold must lie above 0 and at most at 1, not {self.acceptance_threshold!r}"
            )
        if self.draft_temperature is not None and not (
            _is_number(self.draft_temperature) and self.draft_temperature >= 0
        ):
            raise ConfigurationError(
                f"draft_temperature must be a finite number, 0 or more, not {self.draft_temperature!r}"
            )
        if not (_is_number(self.min_gain) and self.min_gain >= 0):
            raise ConfigurationError(f"min_gain must be a finite number, 0 or more, not {self.min_gain!r}")

    @property
    def lossless(self) -> bool:
        """Whether the output follows the target: token for token (`exact`) or in distribution (`rejection`)."""
        return self.acceptance != "threshold"

    @classmethod
    def default(cls) -> SpeculationConfig:
        """The tree that pays on a disk of 1 to 3 GB/s."""
        return cls(tree_size=127, tree_width=16, tree_depth=24, branching=6, min_gain=0.05)

    @classmethod
    def fast(cls) -> SpeculationConfig:
        """A larger, deeper tree: most tokens per pass, for slow disks or very large targets."""
        return cls(tree_size=255, tree_width=24, tree_depth=32, branching=8, min_gain=0.03)

    @classmethod
    def quality(cls) -> SpeculationConfig:
        """A small tree: least compute beside the reading, for fast disks or a slow processor."""
        return cls(tree_size=31, tree_width=8, tree_depth=12, branching=4, min_gain=0.1)

    @classmethod
    def chain(cls, length: int, **settings: Acceptance | float | None) -> SpeculationConfig:
        """A single path of `length` drafted tokens."""
        return cls(tree_size=length, tree_width=1, tree_depth=length, branching=1, **settings)  # type: ignore[arg-type]

    @classmethod
    def chain_default(cls) -> SpeculationConfig:
        """Five drafted tokens, lossy: accepted from a tenth of the target's largest probability on."""
        return cls.chain(5, acceptance="threshold", acceptance_threshold=0.1, draft_temperature=0.7)

    @classmethod
    def chain_fast(cls) -> SpeculationConfig:
        """Eight drafted tokens, lossy: accepted from a twentieth of the target's largest probability on."""
        return cls.chain(8, acceptance="threshold", acceptance_threshold=0.05, draft_temperature=0.7)

    @classmethod
    def chain_quality(cls) -> SpeculationConfig:
        """Four drafted tokens, lossy: accepted from a fifth of the target's largest probability on."""
        return cls.chain(4, acceptance="threshold", acceptance_threshold=0.2, draft_temperature=0.7)


PRESETS = {
    "default": SpeculationConfig.default,
    "fast": SpeculationConfig.fast,
    "quality": SpeculationConfig.quality,
}
