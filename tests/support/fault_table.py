"""Prints what was seen under every fault as a markdown table.

python tests/support/fault_table.py [FOLDER]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from fault_cases import FAULTS, Fault
from fault_runs import RUN_ID, Rows, Seen, rows, run_folder, seen


def run_all(folder: Path, *names: str) -> None:
    """Run all faults in a process that has imported nothing of ours."""
    program = Path(__file__).with_name("fault_runs.py")
    subprocess.run([sys.executable, str(program), str(folder), *names], check=True)


def observed(folder: Path, fault: Fault, operators: int) -> tuple[Seen, Seen, Rows]:
    """The run without us, the run with us, and what can be read of it."""
    home = run_folder(folder, fault, is_bare=False)
    bare = seen(run_folder(folder, fault, is_bare=True))
    return bare, seen(home), rows(home, operators=operators)


def num_operators(folder: Path, fault: Fault) -> int:
    """Operators of one hooked step of the same loop where nothing is wrong."""

    from forerun.calib.records.record_kinds import OperatorRecord
    from forerun.calib.samples.store import read_run

    same = (fault.loop, fault.num_ranks)
    name = next(f for f in FAULTS if f.is_control and (f.loop, f.num_ranks) == same)
    run = read_run(run_folder(folder, name, is_bare=False) / "out", RUN_ID)
    counts = Counter(r.step for r in run.records[0] if isinstance(r, OperatorRecord))
    return min(counts.values())


def line(fault: Fault, bare: Seen, ours: Seen, kept: Rows) -> str:
    """One row of the table."""
    same = "same" if ours.losses == bare.losses else "DIFFERENT"
    drawn = "same" if ours.random == bare.random else "DIFFERENT"
    status = ",".join(map(str, ours.status))
    if ours.status != bare.status:
        status += f" (WITHOUT US {','.join(map(str, bare.status))})"
    if kinds(ours) != kinds(bare):
        status += f" ERRORS {ours.errors} NOT {bare.errors}"
    late_s = ours.took_s - bare.took_s
    delay = f"{late_s:.0f} s later" if late_s > 2.5 else ""
    return " | ".join(
        (
            f"| {fault.name}",
            f"{same} ({sum(map(len, bare.losses))})",
            drawn,
            status,
            delay,
            f"{len(ours.left)}: {', '.join(ours.left)[:60]}" if ours.left else "none",
            words(kept),
            f"{'; '.join(kept.problems)[:90]} |",
        )
    )


def kinds(run: Seen) -> list[str]:
    """The errors that ended the ranks; those of gloo name a port, so only their type."""
    return [e.partition(":")[0] if "RuntimeError" in e else e for e in run.errors]


def words(kept: Rows) -> str:
    """Which rows of rank 0 can be read."""
    if not kept.steps:
        return "nothing"
    parts = [f"steps {spans(kept.steps)}"]
    parts += [f"operators of {spans(kept.whole)}"] * bool(kept.whole)
    parts += [f"some operators of {spans(kept.partial)}"] * bool(kept.partial)
    parts += [f"flagged {spans(kept.faulted)}"] * bool(kept.faulted)
    parts += ["window closed"] * bool(kept.windows)
    return ", ".join(parts)


def spans(numbers: tuple[int, ...]) -> str:
    """``0-2, 5`` for (0, 1, 2, 5)."""
    if len(numbers) > 2 and numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))


def main(folder: Path, *names: str) -> None:
    """Run and print."""
    if not folder.exists():
        run_all(folder, *names)
    print("| fault | losses | random state | exit status | delay | hooks left | readable | named |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for fault in FAULTS:
        if run_folder(folder, fault, is_bare=False).exists():
            bare, ours, kept = observed(folder, fault, num_operators(folder, fault))
            print(line(fault, bare, ours, kept))
            if kept != fault.rows or ours.status != fault.status:
                print(f"{fault.name}: expected {words(fault.rows)}", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), *sys.argv[2:])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch) / "runs")
