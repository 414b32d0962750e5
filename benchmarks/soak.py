"""A long run of the recipe with many windows: memory growth, and the companion's exit.

    python benchmarks/soak.py [--steps 40000] [--every 500] [--sleep-ms 8] [--keep DIR]

One rank trains a small model with the companion on the other core.  Memory of training and
companion is read from /proc, and the processor time of each answer, from one change of
``decision.json`` to the next.  Exits with 1 if one of the verdicts does not hold.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LOOK_EVERY_S = 0.2
ENDED = "soak: training ended at "
SMALL = (
    *("--num-layers=1", "--hidden-size=64", "--num-attention-heads=2", "--seq-length=32"),
    *("--micro-batch-size=1", "--global-batch-size=2", "--eval-iters=0", "--log-interval=1000"),
)
MOST_GROWTH = 1.05
MOST_TIME_GROWTH = 1.2
GONE_WITHIN_S = 30.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """One process at one moment."""

    unix_s: float
    nbytes: int
    num_threads: int
    num_files: int
    processor_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One claim, with the two values that it is based on."""

    claim: str
    before: float
    after: float
    holds: bool


def sample_process(pid: int) -> ProcessSample | None:
    """Return the process's current usage; None if it is gone."""
    home = Path("/proc") / str(pid)
    try:
        stat_fields = (home / "stat").read_text().rpartition(")")[2].split()
        pages = int((home / "statm").read_text().split()[1])
        num_files = len(list((home / "fd").iterdir()))
    except OSError:
        return None
    if stat_fields[0] in "ZX":
        return None
    return ProcessSample(
        unix_s=time.time(),
        nbytes=pages * _PAGE_NBYTES,
        num_threads=int(stat_fields[17]),
        num_files=num_files,
        processor_s=(int(stat_fields[11]) + int(stat_fields[12])) / _TICKS_PER_S,
    )


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the descendants of a process, with their command lines."""
    for folder in (Path("/proc") / str(pid) / "task").glob("*/children"):
        for child in map(int, folder.read_text().split()):
            try:
                words = (Path("/proc") / str(child) / "cmdline").read_bytes()
            except OSError:
                continue
            yield child, words.replace(b"\0", b" ").decode(errors="replace")
            yield from descendants(child)


class Watch:
    """Samples the two processes until both are gone."""

    def __init__(self, launcher: subprocess.Popen[bytes], directory: Path, log: Path) -> None:
        self._launcher, self._log = launcher, log
        self._answer = directory / "latest" / "decision.json"
        self._mtime_ns = 0
        self.training: list[ProcessSample] = []
        self.companion: list[ProcessSample] = []
        self.answers: list[ProcessSample] = []
        """Samples of the companion at each of its answers."""
        self.ended_unix_s = self.gone_unix_s = 0.0

    def run(self) -> None:
        """Sample until the launcher has ended and the companion is gone."""
        pids: dict[str, int] = {}
        while True:
            if len(pids) < 2 and self._launcher.poll() is None:
                pids |= self._find_pids()
            trained = sample_process(pids["training"]) if "training" in pids else None
            companion_look = sample_process(pids["companion"]) if "companion" in pids else None
            if trained is not None:
                self.training.append(trained)
            if companion_look is not None:
                self._note(companion_look)
            elif self.companion and not self.gone_unix_s:
                self.gone_unix_s = time.time()
            if self._launcher.poll() is not None and companion_look is None:
                break
            time.sleep(LOOK_EVERY_S)
        for line in self._log.read_text(errors="replace").splitlines():
            if ENDED in line:
                self.ended_unix_s = float(line.partition(ENDED)[2])

    def _note(self, companion_look: ProcessSample) -> None:
        self.companion.append(companion_look)
        try:
            mtime_ns = self._answer.stat().st_mtime_ns
        except OSError:
            return
        if mtime_ns != self._mtime_ns:
            self._mtime_ns = mtime_ns
            self.answers.append(companion_look)

    def _find_pids(self) -> dict[str, int]:
        pids = {}
        for pid, words in descendants(self._launcher.pid):
            if "forerun.companion" in words:
                pids["companion"] = pid
            elif "--worker" in words and "torchrun" not in words:
                pids.setdefault("training", pid)
        return pids


def verdicts(watch: Watch, *, num_windows: int) -> list[Verdict]:
    """Return the claims; those on answers are left out if there were too few."""
    early, late = quarters(watch.training)
    threads, files = max(x.num_threads for x in early), max(x.num_files for x in early)
    gone_s = watch.gone_unix_s - watch.ended_unix_s
    memory = (_mib(early), _mib(late), MOST_GROWTH)
    claims: list[tuple[str, float, float, float]] = [
        ("training: resident MiB, second and last quarter", *memory),
        ("training: threads", threads, late[-1].num_threads, 1.0),
        ("training: open files", files, late[-1].num_files, 1.0),
        ("companion: gone, s after the end (at most)", GONE_WITHIN_S, gone_s, 1.0),
    ]
    if len(watch.answers) >= 8:
        # Cost from one answer to the next; it covers several windows if some were skipped.
        spent = [b.processor_s - a.processor_s for a, b in pairwise(watch.answers)]
        took_s = (statistics.median(spent[1:4]), statistics.median(spent[-4:-1]), MOST_TIME_GROWTH)
        memory = (_mib(watch.answers[2:5]), _mib(watch.answers[-3:]), MOST_GROWTH)
        number = (num_windows, len(watch.answers), math.inf)
        claims += [
            ("companion: resident MiB, third answer and last", *memory),
            ("companion: processor s per answer, third and last", *took_s),
            ("companion: windows, and answers among them", *number),
        ]
    return [
        Verdict(claim=claim, before=before, after=after, holds=after <= most_growth * before)
        for claim, before, after, most_growth in claims
    ]


def quarters(
    looks: Sequence[ProcessSample],
) -> tuple[Sequence[ProcessSample], Sequence[ProcessSample]]:
    """Return the second and the last quarter of a run, without its last moments."""
    part = max(1, len(looks) // 4)
    return looks[part : 2 * part] or looks[:1], looks[3 * part : -3] or looks[-1:]


def _mib(looks: Sequence[ProcessSample]) -> float:
    return statistics.median(x.nbytes for x in looks) / 2**20


def worker(sleep_s: float, argv: Sequence[str]) -> None:
    """Run the recipe, slowed down a little."""
    sys.path.insert(0, str(ROOT / "recipes"))
    sys.argv = ["pretrain_gpt.py", *argv]
    import pretrain_gpt

    step = pretrain_gpt.Trainer._step

    def slower(self: Any, data: Any) -> Any:
        time.sleep(sleep_s)
        return step(self, data)

    pretrain_gpt.Trainer._step = slower  # type: ignore[method-assign]
    pretrain_gpt.main()
    print(f"{ENDED}{time.time():.3f}", flush=True)


def soak(args: argparse.Namespace, directory: Path) -> tuple[Watch, int]:
    """Run it; return the watch, and the status of the launcher."""
    command = [
        *(str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node=1"),
        *(__file__, "--worker", f"--sleep-ms={args.sleep_ms}", "--"),
        *(*SMALL, f"--train-iters={args.steps}"),
        *("--calibrate", f"--calibrate-every={args.every}", f"--calibrate-dir={directory}"),
        "--calibrate-wandb=off",
    ]
    log = directory / "soak.log"
    directory.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        launcher = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=directory
        )
        watch = Watch(launcher, directory, log)
        watch.run()
    return watch, launcher.wait()


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--sleep-ms", type=float, default=8.0, help="added to each step")
    parser.add_argument("--keep", type=Path, help="directory of the run; default: a temporary one")
    parser.add_argument("--json", type=Path, help="looks and verdicts as JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    if args.worker:
        worker(args.sleep_ms * 1e-3, args.options)
        return 0
    with tempfile.TemporaryDirectory() as home:
        load = os.getloadavg()
        watch, status = soak(args, (args.keep or Path(home)).resolve())
        if status or not watch.training or not watch.companion:
            log = (args.keep or Path(home)) / "soak.log"
            sys.exit(f"the run failed with {status}:\n{log.read_text(errors='replace')[-3000:]}")
    verdict_rows = verdicts(watch, num_windows=args.steps // args.every)
    took_s = watch.ended_unix_s - watch.training[0].unix_s
    loads = f"{load[0]:.1f} before, {os.getloadavg()[0]:.1f} after"
    print(f"{args.steps} steps in {took_s:.0f} s with the start; load {loads}")
    for row in verdict_rows:
        word = "holds" if row.holds else "FAILS"
        print(f"{word}  {row.claim}: {row.before:.2f} {row.after:.2f}")
    if args.json:
        looks = {"training": watch.training, "answers": watch.answers}
        output = {name: [asdict(row) for row in rows] for name, rows in looks.items()}
        output["verdicts"] = [asdict(row) for row in verdict_rows]
        args.json.write_text(json.dumps(output), encoding="utf-8")
    return int(not all(row.holds for row in verdict_rows))


if __name__ == "__main__":
    sys.exit(main())
