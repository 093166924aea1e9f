"""The command line: what it prints and where, its exit codes, and one clear line for every bad input."""

from __future__ import annotations

import io
import json
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drawbar.cli import _run
from drawbar.engine import Engine
from drawbar.text import TextStream, decode, encode, encode_chat, load_tokenizer
from tests.support.checkpoints import make_checkpoint, tiny_tokenizer

FIELDS = ["text", "token_ids", "prompt_tokens", "finish_reason", "seed", "model", "draft", "exact", "stats"]
STATS = {
    "rounds", "target_passes", "draft_passes", "draft_tokens", "accepted_tokens",
    "rejected_tokens", "bonus_tokens", "tokens_per_pass", "acceptance_rate", "speedup",
    "bytes_read", "load_s", "prefill_s", "draft_s", "verify_s",
    "io_wait_s", "total_s", "seconds_per_token", "peak_memory_bytes",
}  # fmt: skip
Checkpoint = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint("llama", tmp_path_factory.mktemp("model") / "tiny")
    return tiny_tokenizer(path)


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = _run(["generate", *map(str, arguments)], debug=False)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line that a bad input gives."""
    code, out, err = run(capsys, *arguments)
    assert code == 2 or "not finite" in err
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    return err


def test_text_goes_to_stdout_and_figures_to_stderr(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, model, "the sky", "--max-new-tokens", "12", "--memory", "1GiB")
    assert code == 0 and len(out) > 1 and "tokens per pass" in err and "draft: self-int4" in err
    code, quiet, err = run(capsys, model, "the sky", "--max-new-tokens", "12", "--quiet", "--draft", "none")
    assert (code, quiet, err) == (0, out, "")


def test_json_is_one_object_with_the_promised_fields(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (model, "the sky", "--max-new-tokens", "12", "--json", "--quiet", "--temperature", "0.8", "--seed", "4")
    code, out, err = run(capsys, *arguments)
    record = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert list(record) == FIELDS and set(record["stats"]) >= STATS
    assert record["seed"] == 4 and record["exact"] is True and len(record["token_ids"]) == 12
    assert record["finish_reason"] == "length" and record["stats"]["peak_memory_bytes"] > 0
    drawn = [json.loads(run(capsys, *arguments[:-2])[1])["seed"] for _ in range(2)]
    assert drawn[0] != drawn[1]
    lossy = json.loads(run(capsys, *arguments, "--acceptance", "threshold")[1])
    assert lossy["exact"] is False


@pytest.mark.parametrize(
    "option", [("--draft", "none"), ("--preset", "fast"), ("--tree-size", "3"), ("--tree-depth", "1")]
)
def test_speculation_options_change_no_token(
    option: tuple[str, str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (model, "the dog", "--max-new-tokens", "16", "--json", "--temperature", "1", "--seed", "9")
    plain, other = (json.loads(run(capsys, *arguments, *more)[1]) for more in ((), option))
    assert plain["token_ids"] == other["token_ids"]


def test_the_prompt_comes_from_stdin(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--max-new-tokens", "8", "--raw", "--temperature", "0")
    expected = run(capsys, model, "the sky", *arguments)[1]
    for given in (("-",), ()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("the sky"))
        assert run(capsys, model, *given, *arguments)[1] == expected
    assert run(capsys, model, "the sky", "--max-new-tokens", "0")[:2] == (0, "")


def test_bad_usage(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ("--nonsense",), ("--acceptance", "never"), ("--temperature", "-1"), ("--temperature", "nan"), ("--top-p", "0"),
        ("--memory", "lots"), ("--tree-size", "0"), ("--max-new-tokens", "-1"), ("--top-k", "0"), ("--seed", "-1"),
        ("--raw", "--system", "x"), ("--acceptance-threshold", "0.5"), ("--draft", "/nowhere"),
    ):  # fmt: skip
        refused(capsys, model, "x", *arguments)
    for prompt in ("", " "):
        assert "prompt is empty" in refused(capsys, model, prompt)


def test_a_prompt_longer_than_the_context(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "512" in refused(capsys, model, "sky " * 600)


def test_a_budget_too_small_says_what_is_needed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, model, "x", "--memory", "1MiB", "--draft", "none")
    (needed,) = [word for word in message.split() if word.endswith("MiB,")]
    assert run(capsys, model, "x", "--memory", needed.rstrip(","), "--draft", "none", "--max-new-tokens", "2")[0] == 0


def test_damaged_weights(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    for broken in (whole[:-1], whole[: len(whole) // 2], whole[:4], b"", struct.pack("<Q", 1 << 60) + whole[8:]):
        file.write_bytes(broken)
        assert "model.safetensors" in refused(capsys, copy, "x")
    file.unlink()
    assert str(copy) in refused(capsys, copy, "x")


def test_shards_that_are_not_there(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for shard, held in halves.items():
        save_file({name: tensors[name] for name in held}, copy / shard)
    weight_map = {name: shard for shard, held in halves.items() for name in held}
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert run(capsys, copy, "x", "--max-new-tokens", "2")[0] == 0
    (copy / "b.safetensors").unlink()
    assert "b.safetensors" in refused(capsys, copy, "x")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weight_map, "a.safetensors")}))
    assert "stale" in refused(capsys, copy, "x")


def test_what_is_no_checkpoint(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "nonsense9000"}))
    assert "nonsense9000" in refused(capsys, copy, "x")
    (copy / "config.json").write_text(json.dumps(config))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    shutil.copy(copy / "model.safetensors", adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text("{}")
    assert "adapter" in refused(capsys, adapter, "x", "--raw")
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    assert "GGUF" in refused(capsys, gguf, "x", "--raw")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    assert "tokenizer" in refused(capsys, copy, "x")


def test_float16_overflow(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copy / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    tensors[name] = torch.full_like(tensors[name], 3e38)
    save_file(tensors, file, metadata={"format": "pt"})
    assert "bfloat16" in refused(capsys, copy, "x", "--dtype", "float16", "--draft", "none")


def test_a_draft_of_another_vocabulary(model: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, model, "x", "--draft", copy, "--draft-quantize", "int4", "--max-new-tokens", "4")[0] == 0
    path = copy / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))
    assert "another vocabulary" in refused(capsys, model, "x", "--draft", copy)


def test_debug_shows_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["generate", "/nowhere", "x", "--debug"], debug=True) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_ctrl_c_keeps_what_was_produced(model: Path, more: tuple[str, ...]) -> None:
    command = [sys.executable, "-u", "-m", "drawbar", "generate", str(model), "the sky", "--draft", "none", "--raw"]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "400", "--temperature", "1", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    first = b"" if more else process.stdout.read(1)
    time.sleep(6 if more else 0)
    process.send_signal(signal.SIGINT)
    sent = time.perf_counter()
    out, err = process.communicate(timeout=60)
    if process.returncode == 0:  # a quick machine was done before the signal came
        return
    if more and not out and process.returncode == -signal.SIGINT:  # a slow machine was still starting Python
        return
    assert process.returncode == 130, err
    assert time.perf_counter() - sent < 5
    assert b"Traceback" not in err
    if more and out:
        assert json.loads(out)["finish_reason"] == "interrupted"
    assert more or first


def test_text_arrives_in_whole_characters(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    text = "naïve 🐎 pulls — 重い load"
    tokens = encode(tokenizer, text)
    stream = TextStream(tokenizer)
    pieces = [stream.push([token]) for token in tokens]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == decode(tokenizer, tokens) == text


def test_a_chat_has_one_bos_and_streams_what_it_answers(model: Path) -> None:
    messages = [{"role": "user", "content": "why?"}]
    tokenizer = load_tokenizer(model)
    assert encode_chat(tokenizer, messages).count(tokenizer.bos_token_id) == 1
    with Engine.from_pretrained(model, draft="self-int4", memory="1GiB") as engine:
        answer = engine.chat(messages, max_new_tokens=20)
        assert "".join(engine.stream(messages, max_new_tokens=20)) == answer.text
        assert (
            engine.generate("the sky", max_new_tokens=5).token_ids
            == engine.generate(engine.encode("the sky"), max_new_tokens=5).token_ids
        )
