"""Programs run and measured from outside: memory caps, peak memory, the disk's own speed, the machine."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROUPS = Path("/sys/fs/cgroup")
FIO_JOBS = 4


@dataclass(frozen=True, slots=True)
class Cap:
    """A memory cgroup, which counts the page cache too.

    Attributes:
        folder: where it is.
        peak_file: what holds its largest usage; older kernels with cgroup v2 have none.
    """

    folder: Path
    peak_file: str

    @property
    def peak(self) -> int | None:
        """Bytes that the group used at the most."""
        try:
            return int((self.folder / self.peak_file).read_text())
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Remove it, once what ran in it has gone."""
        for _ in range(50):
            with suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.1)


def open_cap(nbytes: int) -> Cap | None:
    """A new memory cgroup of this size, v1 or v2; None where the machine does not let one be made."""
    name = f"drawbar-{os.getpid()}-{time.monotonic_ns()}"
    v1, v2 = GROUPS / "memory", GROUPS
    if (v1 / "memory.limit_in_bytes").exists():
        limits, peak, parent = {"memory.limit_in_bytes": nbytes}, "memory.max_usage_in_bytes", v1
    elif (v2 / "cgroup.controllers").exists():
        limits, peak, parent = {"memory.max": nbytes, "memory.swap.max": 0}, "memory.peak", v2
        with suppress(OSError):
            (v2 / "cgroup.subtree_control").write_text("+memory")
    else:
        return None
    cap = Cap(parent / name, peak)
    try:
        cap.folder.mkdir()
    except OSError:
        return None
    try:
        for file, limit in limits.items():
            if file != "memory.swap.max" or (cap.folder / file).exists():  # no such file without swap accounting
                (cap.folder / file).write_text(str(limit))
    except OSError:
        cap.close()
        return None
    return cap


# On Linux a program inherits, as its own peak, the peak of the process that started it (`exec` carries it over). A
# launcher of 10 MiB in between keeps what the benchmark itself has used out of the figure.
_LAUNCHER = """
import os, signal, sys
result, *command = sys.argv[1:]
pid = os.posix_spawnp(command[0], command, os.environ)
signal.signal(signal.SIGINT, signal.SIG_IGN)
_, status, usage = os.wait4(pid, 0)
with open(result, "w") as file:
    file.write(f"{os.waitstatus_to_exitcode(status)} {usage.ru_maxrss * 1024}")
"""


def run(command: Sequence[str], cap_bytes: int | None = None, log: Path | None = None) -> dict[str, Any]:
    """Run a program, in a cgroup of its own if a cap is asked for and can be made.

    Returns:
        `exit_code` (negative: the signal that ended it), `seconds`, `peak_rss` as the system counted it, `cap` (None:
        there was none) and `peak_cgroup`.
    """
    cap = None if cap_bytes is None else open_cap(cap_bytes)
    if cap is not None:
        # A shell joins the group and becomes the program: everything the program takes is counted.
        command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(cap.folder / "cgroup.procs"), *command]
    try:
        with tempfile.NamedTemporaryFile("r") as result, log.open("w") if log else nullcontext() as stream:
            launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, result.name]
            started = time.perf_counter()
            subprocess.run([*launcher, *command], check=True, stdout=stream, stderr=stream)
            seconds = time.perf_counter() - started
            exit_code, peak_rss = map(int, result.read().split())
        return {
            "exit_code": exit_code,
            "seconds": seconds,
            "peak_rss": peak_rss,
            "cap": cap_bytes if cap else None,
            "peak_cgroup": cap.peak if cap else None,
        }
    finally:
        if cap is not None:
            cap.close()


def run_recorded(command: Sequence[str], cap_bytes: int | None = None, show: bool = False) -> dict[str, Any]:
    """Run a program that takes `--record FILE` and writes figures there; they come with those of `run`.

    With `show`, it writes to this terminal; else to nowhere, and if it fails the last line is the `error`.
    """
    with tempfile.TemporaryDirectory() as folder:
        record, log = Path(folder) / "record.json", Path(folder) / "log"
        measured = run([*command, "--record", str(record)], cap_bytes, None if show else log)
        if measured["exit_code"] == 0 and record.exists():
            return {**json.loads(record.read_text()), **measured}
        lines = [] if show else log.read_text(errors="replace").strip().splitlines()
        reason = "killed, out of memory under the cap" if measured["exit_code"] == -9 else (lines or [""])[-1]
        return {**measured, "error": f"exit code {measured['exit_code']}: {reason}"}


def prepare(*what: str) -> Path:
    """Make a checkpoint in another process; `what` as for `python -m benchmarks.checkpoints`. Returns its folder."""
    command = [sys.executable, "-m", "benchmarks.checkpoints", *what]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Path(output.strip().splitlines()[-1])


def weight_files(checkpoint: Path) -> list[Path]:
    """A checkpoint's shards."""
    return sorted(checkpoint.glob("*.safetensors"))


def forget(checkpoint: Path) -> None:
    """Ask the system to drop a checkpoint from its page cache, so that nobody starts from what another has read."""
    for file in weight_files(checkpoint):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def fio_speed(checkpoint: Path) -> float | None:
    """Bytes a second that fio reads from a checkpoint's shards: O_DIRECT, 16 MiB, 4 jobs; None without fio.

    The shards are dealt out to the jobs: four jobs that read the same blocks at the same time would measure a cache.
    """
    fio, files = shutil.which("fio"), weight_files(checkpoint)
    if fio is None:
        return None
    command = [fio, "--output-format=json", "--readonly", "--rw=read", "--direct=1", "--bs=16M", "--ioengine=psync"]
    command += ["--group_reporting", "--thread", "--runtime=6", "--time_based", "--file_service_type=sequential"]
    for job in range(min(FIO_JOBS, len(files))):
        command += [f"--name=read{job}", "--filename=" + ":".join(map(str, files[job::FIO_JOBS]))]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(output[output.index("{") :])["jobs"][0]["read"]["bw_bytes"])


def machine() -> dict[str, Any]:
    """What the figures were measured on, when, and how busy it was."""
    packages = ("drawbar", "torch", "transformers", "accelerate", "safetensors")
    return {
        "date": datetime.date.today().isoformat(),
        "processor": _first(r"model name\s*:\s*(.+)", "/proc/cpuinfo") or platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
    }


def _first(pattern: str, file: str) -> str | None:
    with suppress(OSError):
        found = re.search(pattern, Path(file).read_text())
        return found[1] if found else None
    return None


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A folder for what a program writes, removed afterwards."""
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)
