"""From logits to a token: one path for target and draft, with noise keyed by (seed, position).

A token is drawn with the Gumbel-max trick: `argmax(processed logits + g)`, where `g` depends on the seed and on the
token's position alone. The draw is therefore the same in whichever pass, batch or tree the logits were computed, and
a draft that ranks its candidates with the same noise guesses the *draw*, not just the distribution
(shared-noise coupling, arXiv 2408.07978). Greedy is the case g = 0.
"""

from __future__ import annotations

import secrets
from functools import lru_cache

import numpy as np
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from drawbar.config import GREEDY_TEMPERATURE, SamplingParams
from drawbar.errors import NumericalError

# Purposes keep streams of random numbers with the same seed and position independent of each other.
TARGET_NOISE = 0
DRAFT_NOISE = 1
RESIDUAL_NOISE = 2
ACCEPTANCE = 3

# Nothing is left of a logit at this temperature; its inverse is still a normal float32.
_FLAT_TEMPERATURE = 2.0**126

_NOISE_CACHE = 48  # positions: enough for the deepest tree, small beside the logits


def draw_seed() -> int:
    """A fresh seed, short enough to type again."""
    return secrets.randbelow(2**32)


def uniforms(seed: int, position: int, purpose: int, count: int) -> np.ndarray:
    """float64 [count], strictly between 0 and 1; a longer request begins with the shorter one's numbers.

    Philox (Salmon et al. 2011) is counter based: no state is carried from one position to the next.
    """
    # As uint64 throughout: NumPy makes a list that holds a number of 2**63 or more into floats, and seeds coincide.
    key = np.array([seed, position], dtype=np.uint64)
    counter = np.array([0, 0, 0, purpose], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(count)
    return ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def gumbel(seed: int, position: int, purpose: int, count: int) -> torch.Tensor:
    """Standard Gumbel noise, float32 [count], finite."""
    return torch.from_numpy(-np.log(-np.log(uniforms(seed, position, purpose, count)))).float()


def _warpers(params: SamplingParams) -> LogitsProcessorList:
    """transformers' own processors behind the temperature, in the order of its `generate`."""
    warpers = LogitsProcessorList()
    if params.top_k is not None:
        warpers.append(TopKLogitsWarper(int(params.top_k)))
    if params.top_p is not None and params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers


class Sampler:
    """Draws tokens for one request.

    Args:
        params: what the user asked for.
        seed: keys the noise; `params.seed` if None, and a fresh one if that is None too.
    """

    def __init__(self, params: SamplingParams, seed: int | None = None) -> None:
        chosen = params.seed if seed is None else seed
        self.params = params
        self.seed = draw_seed() if chosen is None else chosen
        self._warpers = _warpers(params)
        self._noise = lru_cache(maxsize=_NOISE_CACHE)(self._make_noise)

    @property
    def greedy(self) -> bool:
        return self.params.greedy

    def _make_noise(self, position: int, purpose: int, count: int) -> torch.Tensor:
        return gumbel(self.seed, position, purpose, count)

    def noise(self, position: int, count: int, purpose: int = TARGET_NOISE) -> torch.Tensor:
        """The Gumbel noise, float32 [count], of the token at absolute `position`."""
        return self._noise(position, purpose, count)

    def uniform(self, position: int, index: int) -> float:
        """The `index`-th acceptance draw, in (0, 1), at `position`."""
        return float(uniforms(self.seed, position, ACCEPTANCE, index + 1)[index])

    def processed(self, logits: torch.Tensor, temperature: float | None = None) -> torch.Tensor:
        """Logits [n, vocabulary] after temperature and filters, float32; -inf where a token was removed.

        `temperature` overrides the user's (the draft's own); at 0 only the likeliest token is left, the lowest id
        of those that tie.

        Raises:
            NumericalError: a row holds NaN or +inf, or nothing but -inf.
        """
        scores = logits.float()
        peak = scores.amax(dim=-1, keepdim=True)
        if not bool(torch.isfinite(peak).all()):
            raise NumericalError(
                "the model's logits are not finite: its activations overflow in this dtype; "
                "use --dtype bfloat16 or float32, or check the checkpoint"
            )
        temperature = self.params.temperature if temperature is None else temperature
        if temperature < GREEDY_TEMPERATURE:
            best = scores.argmax(dim=-1, keepdim=True)
            return torch.full_like(scores, -torch.inf).scatter_(-1, best, 0.0)
        # The peak goes to 0 first, so that no temperature can overflow the division.
        scores = (scores - peak) / min(temperature, _FLAT_TEMPERATURE)
        if len(self._warpers):
            scores = self._warpers(torch.empty((len(scores), 0), dtype=torch.long), scores)
        return scores

    def choose(self, logits: torch.Tensor, position: int) -> int:
        """The token at absolute `position`, drawn from one row of logits [vocabulary].

        Raises:
            NumericalError: see `processed`.
        """
        scores = self.processed(logits[None])[0]
        if not self.greedy:
            scores = scores.double() + self.noise(position, len(scores), TARGET_NOISE)
        return int(scores.argmax())

    def draw(self, probabilities: torch.Tensor, position: int) -> int:
        """A token from `probabilities`, float64 [vocabulary], with noise of its own; never one of probability 0.

        Raises:
            NumericalError: there is nothing to draw, or a probability is NaN.
        """
        if not bool(probabilities.sum() > 0):
            raise NumericalError("no token has a probability above 0")
        return int((probabilities.log() + self.noise(position, len(probabilities), RESIDUAL_NOISE)).argmax())
