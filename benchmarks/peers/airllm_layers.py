"""AirLLM, which writes the checkpoint anew, split by layer, and reads one layer at a time.

Run by an interpreter that has AirLLM, so it imports nothing of drawbar.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from airllm import AutoModel  # type: ignore[import-not-found]


def answer(target: Path, prompt: str, tokens: int, copy: Path) -> dict[str, Any]:
    """Answer the prompt, greedily; figures as drawbar's. Writing the second copy is timed apart."""
    started = time.perf_counter()
    model = AutoModel.from_pretrained(str(target), device="cpu", layer_shards_saving_path=str(copy))
    loaded = time.perf_counter()
    text = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    ids = model.tokenizer([text], return_tensors="pt", add_special_tokens=False)["input_ids"]
    began = time.perf_counter()
    output = model.generate(ids, max_new_tokens=tokens, do_sample=False, use_cache=True, return_dict_in_generate=True)
    seconds = time.perf_counter() - began
    new = output.sequences[0, ids.shape[1] :].tolist()
    return {
        "token_ids": new,
        "target_passes": len(new),
        "tokens_per_pass": 1.0,
        "total_s": seconds,
        "seconds_per_token": seconds / len(new),
        "load_s": loaded - started,
        "bytes_written": sum(file.stat().st_size for file in copy.rglob("*") if file.is_file()),
    }


def main() -> None:
    """Answer one prompt with AirLLM for a benchmark."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--scratch", type=Path, required=True, help="where the second copy is written, and removed")
    parser.add_argument("--record", type=Path, required=True)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=a.scratch) as copy:
        a.record.write_text(json.dumps(answer(a.target, a.prompt, a.tokens, Path(copy))))


if __name__ == "__main__":
    main()
