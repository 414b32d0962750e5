"""Prints the results of every fault as a markdown table.

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
    """Return the run without us, the run with us, and its readable records."""
    home = run_folder(folder, fault, is_bare=False)
    bare = seen(run_folder(folder, fault, is_bare=True))
    return bare, seen(home), rows(home, operators=operators)


def num_operators(folder: Path, fault: Fault) -> int:
    """Return the number of operators of a hooked step of the same loop without faults."""

    from forerun.calib.records.record_kinds import OperatorRecord
    from forerun.calib.samples.store import read_run

    same = (fault.loop, fault.num_ranks)
    name = next(f for f in FAULTS if f.is_control and (f.loop, f.num_ranks) == same)
    run = read_run(run_folder(folder, name, is_bare=False) / "out", RUN_ID)
    counts = Counter(r.step for r in run.records[0] if isinstance(r, OperatorRecord))
    return min(counts.values())


def line(fault: Fault, bare: Seen, ours: Seen, readable: Rows) -> str:
    """Return one row of the table."""
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
            f"{len(ours.remaining_hooks)}: {', '.join(ours.remaining_hooks)[:60]}"
            if ours.remaining_hooks
            else "none",
            words(readable),
            f"{'; '.join(readable.problems)[:90]} |",
        )
    )


def kinds(run: Seen) -> list[str]:
    """Return errors that ended the ranks; of gloo's only the type, since they name a port."""
    return [e.partition(":")[0] if "RuntimeError" in e else e for e in run.errors]


def words(readable: Rows) -> str:
    """Describe the readable records of rank 0."""
    if not readable.steps:
        return "nothing"
    parts = [f"steps {spans(readable.steps)}"]
    parts += [f"operators of {spans(readable.whole)}"] * bool(readable.whole)
    parts += [f"some operators of {spans(readable.partial)}"] * bool(readable.partial)
    parts += [f"flagged {spans(readable.faulted)}"] * bool(readable.faulted)
    parts += ["window closed"] * bool(readable.windows)
    return ", ".join(parts)


def spans(numbers: tuple[int, ...]) -> str:
    """Return ``0-2, 5`` for (0, 1, 2, 5)."""
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
            bare, ours, readable = observed(folder, fault, num_operators(folder, fault))
            print(line(fault, bare, ours, readable))
            if readable != fault.rows or ours.status != fault.status:
                print(f"{fault.name}: expected {words(fault.rows)}", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), *sys.argv[2:])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch) / "runs")
