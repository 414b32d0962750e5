"""Extra time of ``import torch`` with Forerun installed but not requested.

    python benchmarks/costs/import_cost.py [--runs 30]

Three views, each in fresh processes: whole imports, interleaved, with Forerun's entry point visible
and hidden (medians, and a 90 % bootstrap interval of the difference); the end of the import, where
torch looks for entry points, measured the same way but without the noise of the second before it;
and the entry point alone, including its module's import.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
IMPORT = """
import sys, time
sys.path[:0] = [{links!r}]
begin = time.perf_counter()
import torch
print(time.perf_counter() - begin)
"""
BACKENDS = """
import os, sys, time
sys.path[:0] = [{links!r}]
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
begin = time.perf_counter()
torch._import_device_backends()
print(time.perf_counter() - begin)
"""
ALONE = """
import sys, time
sys.path[:0] = [{links!r}]
from importlib import metadata
(point,) = [e for e in metadata.entry_points(group="torch.backends") if e.name == "forerun"]
begin = time.perf_counter()
point.load()()
print(time.perf_counter() - begin)
"""


def link_site_packages(home: Path, *, has_forerun: bool) -> Path:
    """Make a folder of links to all installed packages, with or without Forerun's own."""
    home.mkdir()
    site = Path(np.__file__).parent.parent
    for entry in site.iterdir():
        is_ours = "forerun" in entry.name
        if not is_ours or (has_forerun and entry.name.endswith("dist-info")):
            (home / entry.name).symlink_to(entry)
    if has_forerun:
        (home / "forerun").symlink_to(ROOT)
    return home


def seconds(code: str, links: Path) -> float:
    """Return the number that the code prints in a fresh interpreter that sees only the links."""
    command = [sys.executable, "-I", "-S", "-c", code.format(links=str(links))]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def report(name: str, pairs: np.ndarray) -> None:
    """Print medians of (without, with) and the interval of their difference."""
    without, with_it = np.median(pairs, axis=0) * 1e3
    picks = pairs[np.random.default_rng(0).integers(len(pairs), size=(5000, len(pairs)))]
    medians = np.median(picks, axis=1) * 1e3
    low, high = np.quantile(medians[:, 1] - medians[:, 0], [0.05, 0.95])
    print(
        f"{name}, {len(pairs)} interleaved runs: without {without:.2f} ms, with {with_it:.2f} ms, "
        f"difference {with_it - without:+.2f} ms (90 %: {low:+.2f} to {high:+.2f})"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as home:
        bare = link_site_packages(Path(home) / "without", has_forerun=False)
        ours = link_site_packages(Path(home) / "with", has_forerun=True)
        seconds(IMPORT, bare), seconds(IMPORT, ours)
        whole = np.array([(seconds(IMPORT, bare), seconds(IMPORT, ours)) for _ in range(runs)])
        ends = np.array([(seconds(BACKENDS, bare), seconds(BACKENDS, ours)) for _ in range(runs)])
        alone = [seconds(ALONE, ours) for _ in range(runs)]
    report("import torch", whole)
    report("its search for entry points", ends)
    print(f"entry point alone, its import included: median {statistics.median(alone) * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
