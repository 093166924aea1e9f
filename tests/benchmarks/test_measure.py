"""What the benchmarks say of a program is what it did."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measure

MIB = 1 << 20
TAKES = "import sys; data = bytearray(b'1') * (int(sys.argv[1]) << 20)"


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_peak_memory_is_the_programs_own() -> None:
    own = bytearray(b"1") * (300 * MIB)
    small, large = measure.run(python("pass")), measure.run(python(TAKES, "200"))
    assert len(own) == 300 * MIB
    assert small["peak_rss"] < 50 * MIB
    assert 200 * MIB <= large["peak_rss"] < 250 * MIB
    assert large["exit_code"] == small["exit_code"] == 0
    assert large["cap"] is None and large["peak_cgroup"] is None


@pytest.fixture
def capped() -> int:
    cap = measure.open_cap(128 * MIB)
    if cap is None:
        pytest.skip("no memory cgroup can be made here")
    assert cap.folder.exists()
    cap.close()
    assert not cap.folder.exists()
    return 128 * MIB


def test_the_cap_holds_and_its_group_is_removed(capped: int) -> None:
    before = set(measure.GROUPS.glob("**/drawbar-*"))
    fits, too_much = measure.run(python(TAKES, "40"), capped), measure.run(python(TAKES, "400"), capped)
    assert (fits["exit_code"], too_much["exit_code"]) == (0, -9)
    assert fits["cap"] == capped
    if fits["peak_cgroup"] is not None:
        assert 40 * MIB <= fits["peak_cgroup"] <= capped
    assert set(measure.GROUPS.glob("**/drawbar-*")) <= before


def test_the_record_and_the_error_come_back() -> None:
    writes = "import sys; open(sys.argv[-1], 'w').write('{\"tokens\": 3}')"
    assert measure.run_recorded(python(writes))["tokens"] == 3
    failed = measure.run_recorded(python("print('once'); raise SystemExit('because')"))
    assert failed["error"] == "exit code 1: because"
    assert "exit code 0" in measure.run_recorded(python("pass"))["error"]


def test_forgetting_harms_no_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as out:
        out.write(bytes(4 * MIB))
        out.flush()
        os.fsync(out.fileno())
    measure.forget(tmp_path)
    assert file.read_bytes() == bytes(4 * MIB)


def test_without_fio_there_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert measure.fio_speed(tmp_path) is None


def test_the_machine_is_described() -> None:
    described: dict[str, Any] = measure.machine()
    assert described["cores"] == os.cpu_count()
    assert described["versions"]["torch"]
