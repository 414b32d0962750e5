"""Our plan of one case in a process of its own: counts of the proof, time and memory.

    python -m forerun.benchmarks.peers.our_search CASE DIRECTORY [--device NAME] [--price FILE]

DIRECTORY is calibrated.  Prints JSON.  ``--price`` is a list of layouts of another tool
(``search_cases.plain_layout``), which are timed instead.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from forerun.benchmarks.child_process import peak_nbytes, processor_s
from forerun.benchmarks.peers.search_cases import (
    CASES,
    NUM_GPUS,
    PlainLayout,
    configured,
    plain_layout,
)
from forerun.calib.advice import Candidate, compare, plan
from forerun.calib.errors import ForerunError
from forerun.calib.search import Proof, Tally
from forerun.calib.units import GIB
from forerun.calib.workload import RunConfig
from forerun.launch.known import Machine, open_machine

NUM_BEST = 20
_CAPACITY_NBYTES = 80 * GIB


def main() -> None:
    """Print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("directory", type=Path, help="calibrated")
    parser.add_argument("--device", metavar="NAME", help="another one than the run's")
    parser.add_argument("--price", type=Path, metavar="FILE", help="layouts of another tool")
    arguments = parser.parse_args()
    with threadpool_limits(1):
        machine = open_machine(arguments.directory, device=arguments.device)
        config = CASES[arguments.case].on_all(machine.running)
        if arguments.price is None:
            output = _searched(config, machine)
        else:
            output = _priced(config, machine, json.loads(arguments.price.read_text("utf-8")))
    print(json.dumps(output))


def _searched(config: RunConfig, machine: Machine) -> dict[str, Any]:
    begin, processor = time.perf_counter(), processor_s()
    answer = plan(
        config,
        machine.steps,
        num_ranks=NUM_GPUS,
        memory_capacity_nbytes=machine.memory_capacity_nbytes or _CAPACITY_NBYTES,
        memory_offset_nbytes=machine.memory_offset_nbytes,
    )
    return {
        "seconds": time.perf_counter() - begin,
        "processor_seconds": processor_s() - processor,
        "peak_nbytes": peak_nbytes(),
        "counts": _counts(answer.proofs[NUM_GPUS]),
        "best": [_line(one) for one in answer.candidates[:NUM_BEST]],
    }


def _counts(proof: Proof) -> dict[str, float]:
    """Return the numbers of layouts by outcome."""
    tally = proof.tally
    counts = {name: getattr(tally, name) for name in Tally.__slots__}
    return {"num_layouts": tally.num_layouts, **counts, "gap_frac": proof.gap_frac}


def _line(one: Candidate) -> dict[str, Any]:
    return {
        "label": one.label,
        "step_time_s": one.step_time_s,
        "low_s": one.low_s,
        "high_s": one.high_s,
        "verdict": one.verdict.value,
        "layout": plain_layout(one.config),
    }


def _priced(config: RunConfig, machine: Machine, layouts: Sequence[PlainLayout]) -> list[Any]:
    """Return each layout's line, or why it is not possible here."""
    rows: list[Any] = []
    for layout in layouts:
        try:
            (one,) = compare(
                config,
                [configured(config, layout)],
                machine.steps,
                memory_capacity_nbytes=machine.memory_capacity_nbytes or _CAPACITY_NBYTES,
                memory_offset_nbytes=machine.memory_offset_nbytes,
            )
            rows.append(_line(one))
        except ForerunError as error:
            rows.append({"refused": str(error), "layout": layout})
    return rows


if __name__ == "__main__":
    main()
