"""The engine: parts wired under one budget, what it accepts as a prompt, and what it refuses before the first token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drawbar.config import SamplingParams, SpeculationConfig
from drawbar.engine import Engine, needed_context
from drawbar.errors import BudgetError, CheckpointError, ConfigurationError, PromptError, VocabularyError
from drawbar.models.checkpoint import OpenCheckpoint
from drawbar.models.streamed import StreamedModel
from tests.support.checkpoints import make_checkpoint, tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("engine") / "tiny", tokenizer=True)


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def test_an_answer_and_its_figures(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Engine.from_pretrained(model, draft="self-int4", memory="1GiB") as engine:
        first = engine.generate("the sky", max_new_tokens=12)
        second = engine.generate("the sky", max_new_tokens=12)
        total = engine.decoder.stats
    assert first.token_ids == second.token_ids and len(first.token_ids) == 12 and first.finish_reason == "length"
    assert first.prompt_tokens == len(engine.encode("the sky")) == first.stats.prompt_tokens
    assert first.text == engine.tokenizer.decode(first.token_ids, skip_special_tokens=True)
    assert first.stats.load_s == engine.load_s > 0 and 0 < first.stats.target_passes <= 12
    assert (total.tokens, total.requests) == (24, 2)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_a_prompt_may_be_text_or_ids_or_messages(model: Path) -> None:
    with Engine.from_pretrained(model, draft="none", memory="1GiB") as engine:
        ids = engine.encode("the sky")
        expected = engine.generate("the sky", max_new_tokens=4).token_ids
        for prompt in (ids, tuple(ids), np.array(ids)):
            assert engine.generate(prompt, max_new_tokens=4).token_ids == expected
        refused: tuple[Any, ...] = ("", [], [1, {"role": "user", "content": "x"}], [{"role": "user"}], ["text"], [1.5])
        for prompt in refused:
            with pytest.raises(PromptError):
                engine.open(prompt)
            with pytest.raises(PromptError):
                engine.stream(prompt)
        assert engine.decoder.stats.target_passes == 4 * 4  # those of the answers alone


def test_defaults_are_those_of_the_generation_config(copy: Path) -> None:
    path = copy / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 7]}))
    with Engine.from_pretrained(copy, draft="none", memory="1GiB") as engine:
        sampling = engine.default_sampling()
        assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.6, 0.9, None)
        assert engine.end_tokens == (2, 7)
    path.write_text(json.dumps({"temperature": 0.6, "eos_token_id": 7}))
    with Engine.from_pretrained(copy, draft="none", memory="1GiB") as engine:
        assert engine.default_sampling() == SamplingParams() and engine.end_tokens == (7,)
    path.write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        Engine.from_pretrained(copy, draft="none", memory="1GiB")


def test_each_of_several_end_tokens_ends(copy: Path) -> None:
    with Engine.from_pretrained(copy, draft="none", memory="1GiB") as engine:
        tokens = engine.generate("the sky", max_new_tokens=12).token_ids
    end = tokens[5]
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, end]}))
    with Engine.from_pretrained(copy, draft="self-int4", memory="1GiB") as engine:
        out = engine.generate("the sky", max_new_tokens=12)
        assert (out.token_ids, out.finish_reason) == (tokens[: tokens.index(end) + 1], "stop")


def test_a_draft_with_padded_rows_changes_nothing(model: Path, tmp_path: Path) -> None:
    wide = tiny_tokenizer(make_checkpoint("llama", tmp_path / "wide", vocab_size=384, seed=5), 320)
    answers = []
    for target, draft in ((model, "none"), (model, wide), (wide, "none"), (wide, model)):
        with Engine.from_pretrained(target, draft=draft, memory="1GiB", config=SpeculationConfig.chain(5)) as engine:
            answers.append(engine.generate("the sky", max_new_tokens=24, sampling=SamplingParams(1.0, seed=3)))
            assert engine.draft == str(draft)
    assert answers[0].token_ids == answers[1].token_ids and answers[2].token_ids == answers[3].token_ids
    assert answers[1].stats.draft_tokens > 0
    assert max(answers[2].token_ids) >= 320  # the draft had to step aside behind such a token


def test_a_draft_whose_ids_mean_something_else_is_refused(model: Path, copy: Path) -> None:
    path = copy / "tokenizer.json"
    data = json.loads(path.read_text())
    vocabulary = data["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(data))
    with pytest.raises(VocabularyError, match="'a'"):
        Engine.from_pretrained(model, draft=copy, memory="1GiB")


def test_the_draft_is_what_the_budget_holds(model: Path) -> None:
    with pytest.raises(BudgetError, match="needed"):
        Engine.from_pretrained(model, draft="none", memory="1MiB")
    with pytest.raises(BudgetError, match="draft self-int4"):
        Engine.from_pretrained(model, draft="self-int4", memory="1MiB")
    with Engine.from_pretrained(model, memory="1GiB") as engine:
        assert engine.draft == "self-int4"
    for mib in range(50, 1000, 50):
        try:
            engine = Engine.from_pretrained(model, memory=f"{mib}MiB")
        except BudgetError:
            continue
        with engine:
            assert engine.draft == "none"
        break


def test_what_a_request_needs(model: Path) -> None:
    assert needed_context(model, "the sky", 100) == needed_context(model, "the sky", 0) + 100
    with pytest.raises(PromptError, match="512"):
        needed_context(model, "sky " * 600, 1)


def test_more_than_the_caches_were_planned_for_is_refused_before_any_work(model: Path) -> None:
    with Engine.from_pretrained(model, draft="none", memory="1GiB", context=64) as engine:
        with pytest.raises(BudgetError, match="context"):
            engine.generate([5] * 400, max_new_tokens=100)
        assert engine.decoder.stats.target_passes == 0
        assert engine.generate([5] * 10, max_new_tokens=4).finish_reason == "length"


def test_a_closed_engine_says_so(model: Path) -> None:
    least = StreamedModel.least_budget(OpenCheckpoint.open(model, "auto"), 64)
    engine = Engine.from_pretrained(model, draft="none", memory=least, context=64)
    assert engine.target.placement.streamed
    generation = engine.open("the sky", 9)
    next(generation)
    engine.close()
    engine.close()
    with pytest.raises(ConfigurationError, match="closed"):
        next(generation)
