"""Free memory by the kernel's own files, and the process that goes first when there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.hooks.process.free_memory import free_nbytes, make_first_to_go

GIB = 1 << 30
NAMES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}


def machine(home: Path, *, available_nbytes: int = 64 * GIB, groups: str = "") -> None:
    (home / "self").mkdir(parents=True, exist_ok=True)
    (home / "meminfo").write_text(
        f"MemTotal: 1 kB\nMemAvailable:   {available_nbytes >> 10} kB\nSwapFree: 0 kB\n"
    )
    (home / "self" / "cgroup").write_text(groups)


def group(
    folder: Path, version: int, limit: int | str, used: int, inactive: int = 0, active: int = 0
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    total = "total_" * (version == 1)
    for name, value in zip(NAMES[version], (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    stat = f"anon 77\n{total}inactive_file {inactive}\n{total}active_file {active}\n"
    (folder / "memory.stat").write_text(stat)


LINES = {1: "5:cpu,cpuacct:/a/b\n4:memory:{path}\n0::/x\n", 2: "0::{path}\n"}
ROOTS = {1: "memory", 2: ""}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("path", "shown"),
    [("/job/step", "job/step"), ("/docker/0123", ""), ("/", ""), ("/job/step", "job")],
)
def test_the_limit_of_a_group_above_counts(
    tmp_path: Path, version: int, path: str, shown: str
) -> None:
    """Also where only the group of a container is shown, under another path than its own."""
    machine(tmp_path / "proc", groups=LINES[version].format(path=path))
    root = tmp_path / "cgroup" / ROOTS[version]
    group(root / shown, version, 3 * GIB, 2 * GIB, inactive=GIB // 4, active=GIB // 4)
    assert free_nbytes(tmp_path / "proc", tmp_path / "cgroup") == 3 * GIB // 2


@given(
    version=st.sampled_from([1, 2]),
    limits=st.lists(
        st.tuples(st.integers(0, 99), st.integers(0, 99), st.booleans()), min_size=1, max_size=4
    ),
    available=st.integers(0, 99),
)
def test_the_least_of_all_levels_is_free(
    tmp_path_factory: pytest.TempPathFactory,
    version: int,
    limits: list[tuple[int, int, bool]],
    available: int,
) -> None:
    home = tmp_path_factory.mktemp("drawn")
    folder, path, free = home / "cgroup" / ROOTS[version], "", [available << 20]
    for depth, (limit, used, is_limited) in enumerate(limits):
        path += f"/{depth}"
        unlimited = "max" if version == 2 else (1 << 63) - 4096
        group(folder / path[1:], version, limit << 20 if is_limited else unlimited, used << 20)
        free += [(limit - used) << 20] * is_limited
    groups = LINES[version].format(path=path)
    machine(home / "proc", available_nbytes=available << 20, groups=groups)
    assert free_nbytes(home / "proc", home / "cgroup") == min(free)


@pytest.mark.parametrize("text", ["", "x", "1:memory:\n", "0::/\n0::/..\n", "::\n\n"])
def test_what_cannot_be_read_is_no_limit(tmp_path: Path, text: str) -> None:
    assert free_nbytes(tmp_path / "nowhere", tmp_path / "nowhere") == sys.maxsize
    machine(tmp_path / "proc", groups=text)
    group(tmp_path / "cgroup", 2, "max", 5)
    assert free_nbytes(tmp_path / "proc", tmp_path / "cgroup") == 64 * GIB


def test_this_machine_has_memory_free() -> None:
    assert 0 < free_nbytes() < sys.maxsize


TAKER = """
import sys, time
taken, most = [], int(sys.argv[1])
while len(taken) < most:
    taken.append(bytearray(b"x" * (1 << 20)))
    time.sleep(0.002)
open(sys.argv[2], "w").close()
time.sleep(60)
"""


@pytest.fixture
def limited(tmp_path: Path) -> Path:
    """A memory control group of this test with a limit of 128 MiB."""
    name = f"forerun-test-{os.getpid()}"
    for root, limit in (("memory", NAMES[1][0]), (".", NAMES[2][0])):
        folder = Path("/sys/fs/cgroup", root, name)
        with suppress(OSError):
            folder.mkdir()
            try:
                (folder / limit).write_text(str(128 << 20))
                return folder
            except OSError:
                folder.rmdir()
    pytest.skip("no memory control group may be made here")


@pytest.mark.slow
@pytest.mark.parametrize("training_mib", [30, 80])
def test_a_process_of_ours_goes_before_a_larger_one(
    limited: Path, training_mib: int, tmp_path: Path
) -> None:
    """Ours takes memory until the kernel ends one of the two."""

    def start(number_mib: int, name: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", TAKER, str(number_mib), str(tmp_path / name)]
        process = subprocess.Popen(words)
        (limited / "cgroup.procs").write_text(str(process.pid))
        return process

    training = start(training_mib, "training")
    while not (tmp_path / "training").exists():
        time.sleep(0.05)
    ours = start(500, "ours")
    try:
        make_first_to_go(ours.pid)
        assert ours.wait(60) == -signal.SIGKILL
        assert training.poll() is None
    finally:
        for process in (training, ours):
            process.kill()
            process.wait()
        limited.rmdir()
