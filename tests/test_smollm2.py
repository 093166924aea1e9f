"""What must hold on real weights and real text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.exactness import PROMPTS, matrix
from drawbar.config import SpeculationConfig
from drawbar.decoder import SpeculativeDecoder
from drawbar.drafting.model import ModelDrafter
from drawbar.engine import Engine
from drawbar.models.resident import ResidentModel
from drawbar.models.streamed import StreamedModel
from drawbar.text import encode_chat, load_tokenizer

pytestmark = pytest.mark.slow


def test_every_way_of_drafting_gives_the_tokens_of_one_token_decoding_in_bfloat16(smollm2: Path) -> None:
    cells = list(matrix(smollm2, PROMPTS[:2], 30))
    assert [(cell.draft, cell.sampling) for cell in cells if cell.differing] == []
    by_name = {(cell.draft, cell.sampling): cell for cell in cells}
    assert len(by_name) == 18
    assert by_name["tree of 64", "greedy"].tokens_per_pass > 3
    # A chain of nine and the bonus, from the prompt's own pass on: ten tokens a pass, but for the last of each prompt.
    assert by_name["the target itself", "greedy"].tokens_per_pass == pytest.approx(10.0)


def test_greedy_in_float32_equals_transformers(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    prompt = encode_chat(tokenizer, [{"role": "user", "content": PROMPTS[0]}])
    target = ResidentModel.from_pretrained(smollm2, dtype="float32")
    draft = ModelDrafter(ResidentModel.from_pretrained(smollm2, quantize="int4"))
    ours = SpeculativeDecoder(target, draft, SpeculationConfig.quality()).generate(prompt, 64).token_ids
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    theirs = reference.generate(
        torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert list(ours) == theirs[0, len(prompt) :].tolist()


def test_streamed_and_resident_give_the_same_text(smollm2: Path) -> None:
    messages = [{"role": "user", "content": "Name three colours."}]
    with Engine.from_pretrained(smollm2, draft="self-int4", memory="3GiB") as engine:
        everything = engine.chat(messages, max_new_tokens=24)
        assert engine.target.placement.streamed == ()
    least = StreamedModel.from_pretrained(smollm2, memory="400MiB")
    with least, Engine.from_pretrained(smollm2, draft="none", memory="400MiB") as engine:
        assert engine.target.placement.streamed
        little = engine.chat(messages, max_new_tokens=24)
    assert everything.token_ids == little.token_ids
    assert everything.text == little.text
    assert little.stats.bytes_read > 0
