"""Raw counters and the rates that derive from them: counters in, rates out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass(slots=True)
class Stats:
    """What was done, in counts and seconds. Adds up over calls.

    A pass is one walk over all the target's weights; the first pass of a request also reads its prompt.

    Attributes:
        requests: finished calls, also those that failed part way.
        rounds: rounds completed: draft, pass, verification.
        target_passes: passes over the target's weights.
        draft_passes: forward calls of the draft.
        prompt_tokens: tokens of the prompts.
        tokens: tokens produced.
        draft_tokens: drafted nodes that a pass verified.
        accepted_tokens: drafted tokens that were produced.
        rejected_tokens: judgements against the draft: the target's path came to a node with drafted children and
            took none of them. Nodes that the path never came to are neither accepted nor rejected.
        bonus_tokens: tokens that the target gave itself, at most one a pass.
        bytes_read: bytes of weights read from disk for the passes.
        load_s: seconds to open target and draft.
        prefill_s: seconds of the first pass of each request.
        draft_s: seconds of drafting.
        verify_s: seconds of passes and verification, the first pass left out.
        io_wait_s: seconds, within passes, in which computing waited for the disk.
        total_s: seconds of whole requests.
    """

    requests: int = 0
    rounds: int = 0
    target_passes: int = 0
    draft_passes: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    bonus_tokens: int = 0
    bytes_read: int = 0
    load_s: float = 0.0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    io_wait_s: float = 0.0
    total_s: float = 0.0

    def add(self, other: Stats) -> None:
        """Add another's counters to these."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def since(self, earlier: Stats) -> Stats:
        """What was added after `earlier` was copied from these."""
        return Stats(**{field.name: getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self)})

    @property
    def tokens_per_pass(self) -> float:
        """Tokens produced, bonus tokens included, for each pass over the target's weights."""
        return self.tokens / self.target_passes if self.target_passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafted tokens among those judged."""
        judged = self.accepted_tokens + self.rejected_tokens
        return self.accepted_tokens / judged if judged else 0.0

    @property
    def speedup(self) -> float:
        """Tokens for each target pass: how many times fewer passes than one token at a time. Ignores drafting."""
        return self.tokens_per_pass

    @property
    def net_speedup(self) -> float:
        """The same after paying for drafting: passes saved, with draft seconds counted at the price of a pass."""
        passing = self.prefill_s + self.verify_s
        return self.speedup * (passing / (passing + self.draft_s)) if passing else 0.0

    @property
    def seconds_per_token(self) -> float:
        """Wall seconds of requests for each token produced."""
        return self.total_s / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, int | float]:
        """Counters and rates by name."""
        rates = ("tokens_per_pass", "acceptance_rate", "speedup", "net_speedup", "seconds_per_token")
        return {**asdict(self), **{name: getattr(self, name) for name in rates}}
