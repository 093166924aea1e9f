"""The command line: thin, every default from `config`, one line for every error."""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.exceptions import Abort, Exit, TyperException

from drawbar.config import (
    ACCEPTANCE_RULES,
    DEFAULT_ACCEPTANCE_THRESHOLD,
    DEFAULT_MAX_NEW_TOKENS,
    PRESETS,
    SamplingParams,
    SpeculationConfig,
    format_bytes,
)
from drawbar.errors import ConfigurationError, DrawbarError, PromptError

INTERRUPTED = 130

Preset = Enum("Preset", {name: name for name in PRESETS})  # type: ignore[misc]
AcceptanceRule = Enum("AcceptanceRule", {name: name for name in ACCEPTANCE_RULES})  # type: ignore[misc]
Dtype = Enum("Dtype", {name: name for name in ("auto", "bfloat16", "float16", "float32")})  # type: ignore[misc]
Quantization = Enum("Quantization", {name: name for name in ("none", "int4")})  # type: ignore[misc]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Language models far larger than memory, exactly, several tokens per pass over the weights.",
)


@app.callback()
def _commands() -> None:
    """Keeps `generate` a command while it is the only one."""


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or hub id of the target.")],
    prompt: Annotated[str | None, typer.Argument(help="The prompt; read from stdin when absent or '-'.")] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="none, self-int4, or a folder or hub id. [default: self-int4 if the budget holds it, else none]"
        ),
    ] = None,
    draft_quantize: Annotated[
        Quantization, typer.Option(help="Quantise a draft that is given by folder or hub id.")
    ] = Quantization.none,  # type: ignore[attr-defined]
    memory: Annotated[
        str | None, typer.Option(help="Budget for everything, such as 3GiB. [default: what is free less a margin]")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to produce at the most.")] = DEFAULT_MAX_NEW_TOKENS,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy. [default: the model's generation_config]")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw among the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw among the likeliest tokens of this total probability.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Draw among tokens at least this fraction as likely as the likeliest.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Keys the draws. [default: drawn, and reported]")] = None,
    preset: Annotated[Preset, typer.Option(help="Shape of the token tree.")] = Preset.default,  # type: ignore[attr-defined]
    tree_size: Annotated[int | None, typer.Option(help="Drafted tokens per pass. [default: the preset's]")] = None,
    tree_width: Annotated[int | None, typer.Option(help="Nodes per draft call. [default: the preset's]")] = None,
    tree_depth: Annotated[int | None, typer.Option(help="Longest drafted path. [default: the preset's]")] = None,
    acceptance: Annotated[
        AcceptanceRule, typer.Option(help="exact; rejection (exact in distribution); threshold (lossy).")
    ] = AcceptanceRule.exact,  # type: ignore[attr-defined]
    acceptance_threshold: Annotated[
        float | None, typer.Option(help="For threshold: fraction of the target's largest probability that is enough.")
    ] = None,
    draft_temperature: Annotated[float | None, typer.Option(help="Temperature of the draft.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens that caches are planned for. [default: what the prompt and answer need]")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="A system message ahead of the prompt.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="What to compute in.")] = Dtype.auto,  # type: ignore[attr-defined]
    device: Annotated[str, typer.Option(help="Where to compute.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no closing figures.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,
) -> None:
    """Answer one prompt."""
    from drawbar.engine import Engine, needed_context
    from drawbar.hardware import keep_freed_memory

    _silence_transformers()
    keep_freed_memory()
    overrides = {"tree_size": tree_size, "tree_width": tree_width, "tree_depth": tree_depth}
    config = replace(
        PRESETS[preset.value](),
        acceptance=acceptance.value,
        acceptance_threshold=_threshold(acceptance.value, acceptance_threshold),
        draft_temperature=draft_temperature,
        **{name: value for name, value in overrides.items() if value is not None},
    )
    _checked_counts(max_new_tokens, context)
    SamplingParams(temperature or 0.0, top_k, top_p, min_p, seed)
    messages = _messages(prompt, system, raw)
    console = _Reporter(quiet)
    with console.busy("opening the model"):
        engine = Engine.from_pretrained(
            model,
            draft=draft,
            memory=memory,
            config=config,
            dtype=dtype.value,
            device=device,
            draft_quantize=None if draft_quantize.value == "none" else draft_quantize.value,
            context=context or needed_context(model, messages, max_new_tokens),
        )
    with engine:
        choice = "" if draft is not None else _describe_choice(engine.draft)
        sampling = _sampling(engine.default_sampling(), temperature, top_k, top_p, min_p, seed)
        answer = _Answer(engine, console, model, config, as_json, choice)
        answer.run(messages, max_new_tokens, sampling)


def _describe_choice(draft: str) -> str:
    return f"draft: {draft}" + (" (the budget holds no int4 copy)" if draft == "none" else "")


def _threshold(acceptance: str, given: float | None) -> float | None:
    return DEFAULT_ACCEPTANCE_THRESHOLD if acceptance == "threshold" and given is None else given


def _silence_transformers() -> None:
    """What it logs and its progress bars are not for the users of a command; errors reach them as exceptions."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _checked_counts(max_new_tokens: int, context: int | None) -> None:
    if max_new_tokens < 0:
        raise ConfigurationError(f"--max-new-tokens must be 0 or more, not {max_new_tokens}")
    if context is not None and context < 1:
        raise ConfigurationError(f"--context must be 1 or more, not {context}")


def _messages(prompt: str | None, system: str | None, raw: bool) -> str | list[dict[str, str]]:
    """What the engine is given: the bare text with --raw, else a conversation."""
    text = _read_stdin() if prompt is None or prompt == "-" else prompt
    if not raw:
        return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": text}]
    if system is not None:
        raise ConfigurationError("--system needs the chat template, which --raw leaves out")
    return text


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(f"the prompt on stdin is not UTF-8: {error.reason} at byte {error.start}") from error


def _sampling(
    default: SamplingParams,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
) -> SamplingParams:
    """The model's own settings, but for those given."""
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    return replace(default, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


@dataclass
class _Answer:
    """One answer on its way to stdout."""

    engine: Any
    console: _Reporter
    model: str
    config: SpeculationConfig
    as_json: bool
    choice: str

    def run(self, messages: Any, max_new_tokens: int, sampling: SamplingParams) -> None:
        """Print the answer; what was produced is printed also if it ends early."""
        from drawbar.text import TextStream

        prompt = self.engine.encode(messages)
        generation = self.engine.open(prompt, max_new_tokens, sampling)
        text = TextStream(self.engine.tokenizer)
        broken_off: str | None = "error"
        try:
            for tokens in self._rounds(generation):
                if self.choice:
                    self.console.line(self.choice)
                    self.choice = ""
                self._write(text.push(tokens))
            broken_off = None
        except KeyboardInterrupt:
            broken_off = "interrupted"
            raise
        finally:
            if broken_off != "error" or generation.output.token_ids:
                self._write(text.finish())
                self._close(generation, len(prompt), broken_off)

    def _rounds(self, generation: Any) -> Iterator[Sequence[int]]:
        while True:
            produced = generation.output.stats
            label = "reading the prompt: first pass over the weights"
            if produced.target_passes:
                label = f"{produced.tokens} tokens, {produced.tokens_per_pass:.1f} per pass"
            # A status line would run into text on the same terminal, so after the first text there is none.
            visible = self.as_json or not produced.target_passes
            with self.console.busy(label, visible):
                tokens = next(generation, None)
            if tokens is None:
                return
            yield tokens

    def _write(self, piece: str) -> None:
        if piece and not self.as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()

    def _close(self, generation: Any, prompt_tokens: int, broken_off: str | None) -> None:
        output = self.engine.finish(generation.output, prompt_tokens)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self.as_json:
            record = {
                "text": output.text,
                "token_ids": list(output.token_ids),
                "prompt_tokens": output.prompt_tokens,
                "finish_reason": broken_off or output.finish_reason,
                "seed": output.seed,
                "model": self.model,
                "draft": self.engine.draft,
                "exact": self.config.lossless,
                "stats": {**output.stats.as_dict(), "peak_memory_bytes": peak},
            }
            sys.stdout.write(json.dumps(record, ensure_ascii=False) + "\n")
            return
        if output.token_ids:
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._figures(output, peak, broken_off or output.finish_reason)

    def _figures(self, output: Any, peak: int, reason: str) -> None:
        stats = output.stats
        lossy = "" if self.config.lossless else "; LOSSY: threshold acceptance"
        self.console.line(
            f"{stats.tokens} tokens in {stats.total_s:.1f} s: {stats.seconds_per_token:.2f} s per token, "
            f"{stats.tokens_per_pass:.1f} tokens per pass ({stats.target_passes} passes, "
            f"{format_bytes(stats.bytes_read)} read), acceptance {stats.acceptance_rate:.0%}{lossy}"
        )
        self.console.line(
            f"draft {self.engine.draft}; drafting {stats.draft_s:.1f} s, waiting for the disk {stats.io_wait_s:.1f} s; "
            f"peak memory {format_bytes(peak)}; finished by {reason}; seed {output.seed}"
        )


class _Reporter:
    """Progress and figures on stderr; a moving line only on a terminal."""

    def __init__(self, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)

    def line(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)

    @contextmanager
    def busy(self, label: str, visible: bool = True) -> Iterator[None]:
        if not visible or not self._console.is_terminal or self._console.quiet:
            yield
            return
        with self._console.status(label):
            yield


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 bad usage or bad input, 1 anything else, 130 Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(_run(given, debug="--debug" in given))


def _run(arguments: list[str], debug: bool) -> int:
    try:
        code = typer.main.get_command(app).main(args=arguments, prog_name="drawbar", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, Abort):
        return INTERRUPTED
    except TyperException as error:
        return _fail(_usage_message(error), 2, debug)
    except DrawbarError as error:
        return _fail(str(error), error.exit_code, debug)
    except BrokenPipeError:
        _discard_stdout()
        return 1
    except Exception as error:
        return _fail(f"{type(error).__name__}: {error} (a fault of drawbar; --debug shows where)", 1, debug)


def _discard_stdout() -> None:
    """Nobody reads any more: what is still buffered must not fail again when the interpreter ends."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _usage_message(error: TyperException) -> str:
    format_message = getattr(error, "format_message", None)
    return str(format_message() if callable(format_message) else error)


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return code
