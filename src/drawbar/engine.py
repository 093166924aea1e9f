"""Text in, text out: target, draft, tokenizer and decoder under one memory budget."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from drawbar.config import DEFAULT_MAX_NEW_TOKENS, SamplingParams, SpeculationConfig, format_bytes, parse_bytes
from drawbar.decoder import DecoderOutput, FinishReason, Generation, SpeculativeDecoder
from drawbar.drafting.base import Drafter
from drawbar.drafting.model import ModelDrafter
from drawbar.errors import BudgetError, CheckpointError, PromptError
from drawbar.hardware import MAX_ROWS
from drawbar.models.checkpoint import OpenCheckpoint
from drawbar.models.loading import load_config, max_context, resolve_checkpoint
from drawbar.models.resident import ResidentModel, resident_bytes
from drawbar.models.streamed import StreamedModel, default_budget
from drawbar.models.transformer import cache_bytes_per_row, workspace_bytes
from drawbar.stats import Stats
from drawbar.text import Message, TextStream, check_same_vocabulary, decode, encode, encode_chat, load_tokenizer
from drawbar.weights.index import CheckpointIndex

NO_DRAFT = "none"
SELF_INT4 = "self-int4"
DEFAULT_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """An answer.

    Attributes:
        text: the new text, special tokens hidden.
        token_ids: new tokens.
        prompt_tokens: how many the prompt took.
        finish_reason: see `DecoderOutput`.
        seed: what the noise was keyed by.
        stats: counters of this call alone.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason | None
    seed: int
    stats: Stats


class Engine:
    """A target with its draft, ready to answer. Close it, or use it as a context manager, to stop its reading.

    Attributes:
        target: the streamed model.
        draft: what drafts: `none`, `self-int4`, or the draft's folder or hub id.
        decoder: the loop.
        tokenizer: the target's.
        load_s: seconds that opening took.
    """

    def __init__(
        self,
        target: StreamedModel,
        drafter: Drafter | None,
        draft: str,
        tokenizer: PreTrainedTokenizerBase,
        generation: GenerationConfig,
        config: SpeculationConfig | None = None,
        load_s: float = 0.0,
    ) -> None:
        self.target = target
        self.draft = draft
        self.tokenizer = tokenizer
        self.decoder = SpeculativeDecoder(target, drafter, config)
        self.load_s = load_s
        self._generation = generation

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        draft: str | Path | None = None,
        memory: str | int | None = None,
        config: SpeculationConfig | None = None,
        dtype: str = "auto",
        device: str = "cpu",
        draft_quantize: str | None = None,
        context: int = DEFAULT_CONTEXT,
    ) -> Engine:
        """Open a target and its draft within one budget.

        Args:
            name: checkpoint folder or hub id of the target.
            draft: `none`, `self-int4`, a folder or hub id; None is `self-int4` if the budget holds it, else `none`.
            memory: the budget for everything, as bytes or such as `3GiB`; None takes what is free less a margin.
            config: how to speculate.
            dtype: of the target: auto, bfloat16, float16 or float32.
            device: where to compute.
            draft_quantize: `int4` quantises a draft given by folder or id; None leaves it as it is.
            context: tokens, prompt and answer together, that the caches are planned for.

        Raises:
            DrawbarError: checkpoint, draft, option or budget will not do; nothing has been generated.
        """
        started = time.perf_counter()
        budget = default_budget() if memory is None else parse_bytes(memory)
        checkpoint = OpenCheckpoint.open(name, dtype)
        tokenizer = load_tokenizer(checkpoint.folder)
        generation = _generation_config(checkpoint.folder)
        context = min(context, max_context(checkpoint.model.config))
        plan = _DraftPlan.decide(checkpoint, draft, draft_quantize, budget, context, tokenizer)
        model = plan.load(device)
        target = StreamedModel.load(checkpoint, budget - plan.nbytes, device, context)
        drafter = None if model is None else ModelDrafter(model)
        return cls(target, drafter, plan.name, tokenizer, generation, config, time.perf_counter() - started)

    def default_sampling(self) -> SamplingParams:
        """What the model's generation_config asks for, read as transformers reads it: greedy unless it samples."""
        generation = self._generation
        if not generation.do_sample:
            return SamplingParams()
        return SamplingParams(
            temperature=1.0 if generation.temperature is None else generation.temperature,
            top_k=generation.top_k or None,
            top_p=generation.top_p,
            min_p=generation.min_p,
        )

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        ends = self._generation.eos_token_id
        if ends is None:
            ends = self.target.config.eos_token_id
        if ends is None:
            ends = self.tokenizer.eos_token_id
        if ends is None:
            return ()
        return (int(ends),) if isinstance(ends, int) else tuple(int(end) for end in ends)

    def encode(self, prompt: str | Sequence[int] | Sequence[Message]) -> list[int]:
        """Ids of a plain text, of ids as they are, or of a conversation."""
        if isinstance(prompt, str):
            return encode(self.tokenizer, prompt)
        parts: list[Any] = list(prompt)
        if parts and all(hasattr(part, "__index__") for part in parts):
            return [int(part) for part in parts]
        return encode_chat(self.tokenizer, parts)

    def open(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        sampling: SamplingParams | None = None,
    ) -> Generation:
        """Start an answer: iterate over it for lists of new tokens, ask for its `output` at any time."""
        return self.decoder.open(
            self.encode(prompt), max_new_tokens, self.end_tokens, sampling or self.default_sampling()
        )

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        sampling: SamplingParams | None = None,
    ) -> EngineOutput:
        """Continue a plain text (or ids).

        Raises:
            GenerationError: it failed part way; `output` holds the tokens.
            DrawbarError: it failed before the first token.
        """
        return self._answer(prompt, max_new_tokens, sampling)

    def chat(
        self,
        messages: Sequence[Message],
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        sampling: SamplingParams | None = None,
    ) -> EngineOutput:
        """Answer a conversation: messages with `role` and `content`, the last one the user's. Raises as `generate`."""
        return self._answer(list(messages), max_new_tokens, sampling)

    def stream(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        sampling: SamplingParams | None = None,
    ) -> Iterator[str]:
        """The same as text that arrives as it is verified. Bad input is refused at once, not at the first piece."""
        return self._pieces(self.open(prompt, max_new_tokens, sampling))

    def _pieces(self, rounds: Iterable[list[int]]) -> Iterator[str]:
        text = TextStream(self.tokenizer)
        for tokens in rounds:
            if piece := text.push(tokens):
                yield piece
        if piece := text.finish():
            yield piece

    def _answer(self, prompt: Any, max_new_tokens: int, sampling: SamplingParams | None) -> EngineOutput:
        tokens = self.encode(prompt)
        output = self.decoder.generate(tokens, max_new_tokens, self.end_tokens, sampling or self.default_sampling())
        return self.finish(output, len(tokens))

    def finish(self, output: DecoderOutput, prompt_tokens: int) -> EngineOutput:
        """A decoder's output with its text."""
        return EngineOutput(
            decode(self.tokenizer, output.token_ids),
            output.token_ids,
            prompt_tokens,
            output.finish_reason,
            output.seed,
            replace(output.stats, load_s=self.load_s),
        )

    def close(self) -> None:
        """Stop reading. The engine cannot be used afterwards."""
        self.target.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def needed_context(name: str | Path, prompt: str | Sequence[Message], max_new_tokens: int) -> int:
    """Tokens, prompt and answer together, that this request takes: what to plan caches for.

    Raises:
        CheckpointError, UnsupportedModelError: the checkpoint will not do.
        PromptError, ConfigurationError: the prompt is empty, too long, or cannot be put into the chat template.
    """
    folder = resolve_checkpoint(name)
    CheckpointIndex.from_folder(folder)
    limit = max_context(load_config(folder))
    tokenizer = load_tokenizer(folder)
    tokens = encode(tokenizer, prompt) if isinstance(prompt, str) else encode_chat(tokenizer, prompt)
    if len(tokens) >= limit:
        raise PromptError(f"the prompt has {len(tokens)} tokens, which leaves no room in a context of {limit}")
    return len(tokens) + max_new_tokens


@dataclass(frozen=True)
class _DraftPlan:
    """Which draft, and what it takes."""

    name: str
    nbytes: int = 0
    checkpoint: OpenCheckpoint | None = None
    quantize: str | None = None

    @classmethod
    def decide(
        cls,
        target: OpenCheckpoint,
        draft: str | Path | None,
        quantize: str | None,
        budget: int,
        context: int,
        tokenizer: PreTrainedTokenizerBase,
    ) -> _DraftPlan:
        if draft is not None and str(draft) == NO_DRAFT:
            return cls(NO_DRAFT)
        if draft is None or str(draft) == SELF_INT4:
            own = OpenCheckpoint.open(target.folder, "auto")
            plan = cls(SELF_INT4, _draft_bytes(own, "int4", context), own, "int4")
            if draft is None and StreamedModel.least_budget(target, context) + plan.nbytes > budget:
                return cls(NO_DRAFT)
            return plan._within(budget)
        checkpoint = OpenCheckpoint.open(draft, "auto")
        check_same_vocabulary(tokenizer, load_tokenizer(checkpoint.folder), str(draft))
        return cls(str(draft), _draft_bytes(checkpoint, quantize, context), checkpoint, quantize)._within(budget)

    def _within(self, budget: int) -> _DraftPlan:
        if self.nbytes >= budget:
            raise BudgetError(
                f"the draft {self.name} takes {format_bytes(self.nbytes)}, which leaves nothing of a budget of "
                f"{format_bytes(budget)} for the target; raise --memory, or use a smaller draft or --draft none"
            )
        return self

    def load(self, device: str) -> ResidentModel | None:
        return None if self.checkpoint is None else ResidentModel.load(self.checkpoint, self.quantize, device)


def _draft_bytes(checkpoint: OpenCheckpoint, quantize: str | None, context: int) -> int:
    rows = min(context, max_context(checkpoint.model.config)) + MAX_ROWS
    caches = rows * cache_bytes_per_row(checkpoint.model.config, checkpoint.dtype)
    workspace = workspace_bytes(checkpoint.model.config, checkpoint.dtype, rows)
    return resident_bytes(checkpoint, quantize) + caches + workspace


def _generation_config(folder: Path) -> GenerationConfig:
    if not (folder / "generation_config.json").exists():
        return GenerationConfig()
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{folder / 'generation_config.json'}: cannot be read: {reason}") from error
