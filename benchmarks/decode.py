"""Side by side in one run: drawbar with a draft and without, transformers with disk offload, AirLLM, and the disk.

Every program runs in a process of its own, on the same inflated SmolLM2, the same prompt, greedy, and in a memory
cgroup of 3 GiB where one can be made (page cache counted). transformers gets the same int4 copy as its assistant.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.checkpoints import cache_folder, fetch_smollm2, inflated_smollm2

PROMPT = "Write a Python function that computes the factorial of a number."
CAP = 3 << 30
CGROUPS = Path("/sys/fs/cgroup")


def run_drawbar(target: Path, draft: Path | None, tokens: int, memory: str) -> dict[str, Any]:
    """Answer with drawbar in this process."""
    from drawbar.config import SpeculationConfig
    from drawbar.engine import Engine
    from drawbar.hardware import keep_freed_memory

    keep_freed_memory()
    with Engine.from_pretrained(
        target,
        draft="none" if draft is None else draft,
        draft_quantize=None if draft is None else "int4",
        memory=memory,
        config=SpeculationConfig.default(),
        context=512,
    ) as engine:
        prompt = engine.encode([{"role": "user", "content": PROMPT}])
        before = engine.target.counters()
        output = engine.decoder.generate(prompt, tokens)
        after = engine.target.counters()
        return {
            "token_ids": output.token_ids,
            **output.stats.as_dict(),
            "read_speed": (after.bytes_read - before.bytes_read) / (after.busy_s - before.busy_s),
            "disk_busy": (after.busy_s - before.busy_s) / output.stats.total_s,
        }


def run_transformers(target: Path, draft: Path, tokens: int) -> dict[str, Any]:
    """Answer with transformers: layers offloaded to disk by accelerate, an int4 assistant, 16 tokens, constant."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from drawbar.models.quantized import quantize_module

    tokenizer = AutoTokenizer.from_pretrained(target)
    assistant = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.bfloat16)
    quantize_module(assistant.model.layers)
    assistant.generation_config.num_assistant_tokens = 16
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    layers = json.loads((target / "config.json").read_text())["num_hidden_layers"]
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {f"model.layers.{index}": "disk" for index in range(layers)}
    with tempfile.TemporaryDirectory(dir=cache_folder()) as offload:
        model = AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.bfloat16, device_map=device_map, offload_folder=offload
        )
        messages = [{"role": "user", "content": PROMPT}]
        inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        passes = 0

        def count(*_: Any) -> None:
            nonlocal passes
            passes += 1

        model.model.layers[0].register_forward_pre_hook(count)
        started = time.perf_counter()
        output = model.generate(
            **inputs, assistant_model=assistant, do_sample=False, max_new_tokens=tokens, eos_token_id=None
        )
        seconds = time.perf_counter() - started
    new = output[0, inputs["input_ids"].shape[1] :].tolist()
    return {"token_ids": new, "seconds_per_token": seconds / len(new), "tokens_per_pass": len(new) / passes}


def run_airllm(target: Path, tokens: int) -> dict[str, Any]:
    """Answer with AirLLM; called by an interpreter that has it."""
    from airllm import AutoModel  # type: ignore[import-not-found]

    model = AutoModel.from_pretrained(str(target), device="cpu")
    chat = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, tokenize=False
    )
    ids = model.tokenizer([chat], return_tensors="pt", add_special_tokens=False)["input_ids"]
    started = time.perf_counter()
    output = model.generate(ids, max_new_tokens=tokens, do_sample=False, use_cache=True, return_dict_in_generate=True)
    seconds = time.perf_counter() - started
    new = output.sequences[0, ids.shape[1] :].tolist()
    return {"token_ids": new, "seconds_per_token": seconds / len(new), "tokens_per_pass": 1.0}


WORKERS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "drawbar": lambda a: run_drawbar(a.target, a.draft, a.tokens, a.memory),
    "drawbar-none": lambda a: run_drawbar(a.target, None, a.tokens, a.memory),
    "transformers": lambda a: run_transformers(a.target, a.draft, a.tokens),
    "airllm": lambda a: run_airllm(a.target, a.tokens),
}


def make_cap() -> Path | None:
    """A memory cgroup of 3 GiB, or None where the machine does not let one be made."""
    for parent, limit in (
        (CGROUPS / "memory", "memory.limit_in_bytes"),
        (CGROUPS, "memory.max"),
    ):
        if not (parent / "cgroup.procs").exists():
            continue
        group = parent / f"drawbar-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(CAP))
        except OSError:
            continue
        return group
    return None


def run_worker(name: str, python: Path, cap: Path | None, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a worker under the cap; its record, with peak memory as the system measured it, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        command = [str(python), "-m", "benchmarks.decode", "--worker", name, "--record", str(record), *arguments]

        def enter() -> None:
            if cap is not None:
                (cap / "cgroup.procs").write_text(str(os.getpid()))

        log = Path(folder) / "log"
        with log.open("w") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=stream, preexec_fn=enter)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0 or not record.exists():
            last = (log.read_text().strip().splitlines() or ["no output"])[-1]
            return {"error": f"exit code {process.returncode}: {last}"}
        return {**json.loads(record.read_text()), "peak_rss": usage.ru_maxrss * 1024}


def fio_speed(target: Path) -> float | None:
    """Bytes a second that fio reads from the checkpoint's files: O_DIRECT, 16 MiB, 4 jobs; None without fio."""
    fio = shutil.which("fio")
    if fio is None:
        return None
    files = ":".join(str(file) for file in sorted(target.glob("*.safetensors")))
    command = [fio, "--name=read", f"--filename={files}", "--readonly", "--rw=read", "--direct=1", "--bs=16M"]
    command += ["--numjobs=4", "--ioengine=psync", "--group_reporting", "--runtime=8", "--time_based"]
    output = subprocess.run([*command, "--output-format=json"], check=True, capture_output=True, text=True).stdout
    return float(json.loads(output[output.index("{") :])["jobs"][0]["read"]["bw_bytes"])


def airllm_python() -> Path:
    """An interpreter with AirLLM 4.0.0 in an environment of its own."""
    venv = cache_folder() / "airllm-venv"
    python = venv / "bin" / "python"
    if not (venv / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "torch==2.13.0", "airllm==4.0.0", "rich"]
        subprocess.run(install, check=True)
        (venv / ".installed").touch()
    return python


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run everything that was asked for."""
    draft, target = fetch_smollm2(), inflated_smollm2(arguments.gb)
    cap, peers = make_cap(), [peer for peer in arguments.peers.split(",") if peer]
    common = ["--target", str(target), "--draft", str(draft), "--memory", arguments.memory]
    here = Path(sys.executable)
    results: dict[str, Any] = {"fio": fio_speed(target)}
    results["drawbar"] = run_worker("drawbar", here, cap, [*common, "--tokens", str(arguments.tokens)])
    results["drawbar-none"] = run_worker("drawbar-none", here, cap, [*common, "--tokens", "6"])
    if "transformers" in peers:
        results["transformers"] = run_worker("transformers", here, cap, [*common, "--tokens", str(arguments.tokens)])
    if "airllm" in peers:
        results["airllm"] = run_worker("airllm", airllm_python(), cap, [*common, "--tokens", "3"])
    results["machine"] = {
        "date": datetime.date.today().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "memory cap": CAP if cap else None,
    }
    if cap is not None:
        cap.rmdir()
    return results


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def show(results: dict[str, Any], console: Console) -> None:
    """Print the comparison."""
    ours = results["drawbar"]
    table = Table("", "s/token", "tokens/pass", "peak RSS MiB", "same tokens", "drawbar is faster by")
    for name in ("drawbar", "drawbar-none", "transformers", "airllm"):
        record = results.get(name)
        if record is None:
            continue
        if "error" in record or "error" in ours:
            table.add_row(name, record.get("error", ""), "", "", "", "")
            continue
        length = len(record["token_ids"])
        same = list(record["token_ids"]) == list(ours["token_ids"])[:length]
        speed = f"{record['seconds_per_token']:.3f}", f"{record['tokens_per_pass']:.2f}"
        factor = f"{record['seconds_per_token'] / ours['seconds_per_token']:.1f}"
        memory = f"{record['peak_rss'] / 2**20:.0f}"
        table.add_row(f"{name} ({length} tokens)", *speed, memory, "yes" if same else "no", factor)
    console.print(table)
    if results["fio"] and "error" not in ours:
        console.print(
            f"disk: fio {results['fio'] / 1e9:.2f} GB/s; drawbar while reading {ours['read_speed'] / 1e9:.2f} GB/s "
            f"({ours['read_speed'] / results['fio']:.0%}); reading {ours['disk_busy']:.0%} of the time"
        )
    console.print(str(results["machine"]))


def main() -> None:
    """Compare decoders on a target larger than the memory cap."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=main.__doc__)
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--peers", default="transformers,airllm")
    parser.add_argument("--json", type=Path)
    for hidden in ("--worker", "--record", "--target", "--draft"):
        kind = str if hidden == "--worker" else Path
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        arguments.record.write_text(json.dumps(WORKERS[arguments.worker](arguments)))
        return
    results = compare(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    show(results, Console(highlight=False))


if __name__ == "__main__":
    main()
