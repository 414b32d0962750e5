"""Memory that is free to the job, by the machine and the limits of its control groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LEAST_NBYTES = 48 << 20
"""Free memory below which all of it is left to training."""
_FILES = {
    "": ("memory.max", "memory.current", ("inactive_file ", "active_file ")),
    "memory": (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file ", "total_active_file "),
    ),
}
"""Limit, use, and lines of ``memory.stat`` on pages that can be dropped; by controller, of version
2 and 1 of control groups."""


def free_nbytes(proc: Path = Path("/proc"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that the machine and each control group above this process have free, the
    least of them; ``sys.maxsize`` if no limit is known."""
    free = [sys.maxsize]
    with suppress(OSError, ValueError, IndexError):
        lines = (proc / "meminfo").read_text().splitlines()
        free += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            kind = "memory" if "memory" in controllers.split(",") else controllers
            if kind in _FILES:
                free += _free_of_groups(mounted / kind, path, kind)
    return min(free)


def _free_of_groups(root: Path, path: str, kind: str) -> Iterator[int]:
    """Yield the free bytes of a group and those above it; in a container, ``root`` is its own."""
    limit_name, used_name, droppable = _FILES[kind]
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        if folder.is_relative_to(root):
            with suppress(OSError, ValueError, IndexError):  # "max" is no limit
                limit_nbytes = int((folder / limit_name).read_text())
                used_nbytes = int((folder / used_name).read_text())
                lines = (folder / "memory.stat").read_text().splitlines()
                used_nbytes -= sum(int(n.split()[1]) for n in lines if n.startswith(droppable))
                yield limit_nbytes - used_nbytes


def make_first_to_go(pid: int) -> None:
    """Make a process of ours, and what it starts, the first that the kernel ends for lack of
    memory."""
    with suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
