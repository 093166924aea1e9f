"""The command as a process: what it reads, what leaks into its output, and how it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drawbar.cli import _run
from tests.support.checkpoints import make_checkpoint

SHORT = ("--max-new-tokens", "6", "--draft", "none", "--memory", "1GiB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("command") / "tiny", tokenizer=True)


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "drawbar", "generate", *map(str, arguments)]


def finished(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command(*arguments), input=stdin, capture_output=True, timeout=120, check=False)


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom drawbar.cli import _run\n"
        "assert _run(['--help'], False) == _run(['generate', '--help'], False) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_but_the_answer_and_the_figures_is_printed(copy: Path) -> None:
    """Settings that contradict each other make transformers log; a user of the command sees none of it."""
    noisy = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 3, "eos_token_id": 2, "nonsense": 1}
    (copy / "generation_config.json").write_text(json.dumps(noisy))
    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"] = {**(config.get("rope_parameters") or {}), "nonsense": 1}
    (copy / "config.json").write_text(json.dumps(config))
    done = finished(copy, "-", *SHORT, "--json", "--quiet", stdin=b"the sky")
    assert (done.returncode, done.stderr) == (0, b"")
    record = json.loads(done.stdout)
    assert len(record["token_ids"]) == 6 and record["draft"] == "none" and record["model"] == str(copy)
    done = finished(copy, *SHORT, stdin=b"the sky")
    assert done.returncode == 0 and done.stdout.decode() == record["text"] + "\n"
    assert len(done.stderr.splitlines()) == 2 and b"seed" in done.stderr


@pytest.mark.parametrize("arguments", [("\udcff",), ("-",)], ids=["argument", "stdin"])
def test_a_prompt_that_is_not_utf8_is_bad_input(model: Path, arguments: tuple[str, ...]) -> None:
    encoded = [*map(os.fsencode, command(model)), *map(os.fsencode, (*arguments, *SHORT))]
    done = subprocess.run(
        encoded,
        input=b"the sky \xff",
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
    )
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr.count(b"\n") == 1 and b"UTF-8" in done.stderr


def test_a_reader_that_goes_away_is_no_fault(model: Path) -> None:
    arguments = command(model, "the sky", "--max-new-tokens", "300", "--draft", "none", "--memory", "1GiB")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(60) == 1
    assert b"Traceback" not in errors and b"Exception ignored" not in errors and b"BrokenPipe" not in errors


def test_no_template_is_told_to_use_raw(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in copy.glob("*.jinja"):
        path.unlink()
    path = copy / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}))
    assert _run(["generate", str(copy), "x", *SHORT], debug=False) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "--raw" in captured.err and captured.err.count("\n") == 1
    assert _run(["generate", str(copy), "x", "--raw", *SHORT], debug=False) == 0


def test_a_system_message_and_raw_change_the_prompt(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = []
    for more in (("--raw",), (), ("--system", "short")):
        assert _run(["generate", str(model), "why?", "--json", *SHORT, *more], debug=False) == 0
        lengths.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    assert lengths == sorted(set(lengths))


@pytest.mark.parametrize("context", ["0", "-5", "2"])
def test_a_context_that_will_not_do(model: Path, context: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = _run(["generate", str(model), "x " * 200, "--max-new-tokens", "300", "--context", context], debug=False)
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "" and captured.err.count("\n") == 1 and "context" in captured.err


def test_ctrl_c_ends_at_once_and_the_figures_say_why(model: Path) -> None:
    arguments = command(model, "the sky", "--draft", "none", "--raw", "--max-new-tokens", "480", "--temperature", "2")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        sent = time.perf_counter()
        out, errors = process.communicate(timeout=60)
        took = time.perf_counter() - sent
    if process.returncode == 0:  # a quick machine was done before the signal came
        return
    assert process.returncode == 130 and first
    assert (first + out).endswith(b"\n") and b"finished by interrupted" in errors and b"Traceback" not in errors
    assert took < 3
