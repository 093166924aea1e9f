"""transformers with the layers offloaded to disk by accelerate, and an int4 assistant that drafts a chain.

The layers are read from the checkpoint's own safetensors files; nothing is written. The assistant is the int4 copy that
drawbar drafts with, made by the same code.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.answer import PROMPT
from benchmarks.measure import scratch
from drawbar.models.quantized import quantize_module

CHAIN = 16


def load_assistant(folder: Path, confidence: float) -> Any:
    """The draft as transformers' assistant: always `CHAIN` tokens, unless it is less confident than that."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    quantize_module(model.model.layers)
    model.generation_config.num_assistant_tokens = CHAIN
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = confidence
    return model


def load_target(folder: Path, offload: Path) -> Any:
    """The target with every layer on disk, embedding, norm and head in memory."""
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {f"model.layers.{index}": "disk" for index in range(layers)}
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=places, offload_folder=str(offload)
    )


def answer(target: Path, draft: Path, tokens: int, confidence: float, offload: Path) -> dict[str, Any]:
    """Answer the prompt, greedily; figures as drawbar's."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    assistant, model = load_assistant(draft, confidence), load_target(target, offload)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    passes: list[None] = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: passes.append(None))
    started = time.perf_counter()
    output = model.generate(
        **inputs, assistant_model=assistant, do_sample=False, max_new_tokens=tokens, eos_token_id=None
    )
    seconds = time.perf_counter() - started
    new = output[0, inputs["input_ids"].shape[1] :].tolist()
    return {
        "token_ids": new,
        "target_passes": len(passes),
        "tokens_per_pass": len(new) / len(passes),
        "total_s": seconds,
        "seconds_per_token": seconds / len(new),
        "bytes_written": sum(file.stat().st_size for file in offload.rglob("*") if file.is_file()),
    }


def main() -> None:
    """Answer one prompt with transformers for a benchmark."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument(
        "--confidence", type=float, default=0.0, help="stop drafting below it; transformers' own is 0.4"
    )
    parser.add_argument("--scratch", type=Path, required=True, help="where accelerate may write")
    parser.add_argument("--record", type=Path, required=True)
    a = parser.parse_args()
    with scratch(a.scratch) as offload:
        a.record.write_text(json.dumps(answer(a.target, a.draft, a.tokens, a.confidence, offload)))


if __name__ == "__main__":
    main()
