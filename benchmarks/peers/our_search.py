"""Our plan of one case in a process of its own: what it proves, how long, how much memory.

    python -m forerun.benchmarks.peers.our_search CASE DIRECTORY [--device NAME] [--price FILE]

DIRECTORY is calibrated.  Prints JSON.  ``--price`` is a list of layouts of another tool
(``search_cases.told``), which are timed instead.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from forerun.benchmarks.peers.search_cases import CASES, NUM_GPUS, Told, configured, told
from forerun.calib.advice.plan import Candidate, compare, plan
from forerun.calib.errors import ForerunError
from forerun.calib.search.found import Proof, Tally
from forerun.calib.units import GIB
from forerun.calib.workload.config import RunConfig
from forerun.launch.known.machines import Machine, open_machine

NUM_BEST = 20
_CAPACITY_NBYTES = 80 * GIB


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("directory", type=Path, help="calibrated")
    parser.add_argument("--device", metavar="NAME", help="another one than the run's")
    parser.add_argument("--price", type=Path, metavar="FILE", help="layouts of another tool")
    parser.add_argument("--threads", type=int, default=1, help="of linear algebra (1)")
    arguments = parser.parse_args()
    with threadpool_limits(arguments.threads):
        machine = open_machine(arguments.directory, device=arguments.device)
        config = CASES[arguments.case].on_all(machine.own)
        if arguments.price is None:
            found = _searched(config, machine)
        else:
            found = _priced(config, machine, json.loads(arguments.price.read_text("utf-8")))
    print(json.dumps(found))


def _searched(config: RunConfig, machine: Machine) -> dict[str, Any]:
    costs, answers, peak_nbytes = [], [], 0
    for _ in range(2):  # the second has the event orders of the pipelines
        begin, processor = time.perf_counter(), _processor_s()
        answers.append(
            plan(
                config,
                machine.steps,
                num_ranks=NUM_GPUS,
                memory_capacity_nbytes=machine.memory_capacity_nbytes or _CAPACITY_NBYTES,
                memory_offset_nbytes=machine.memory_offset_nbytes,
            )
        )
        costs.append((time.perf_counter() - begin, _processor_s() - processor))
        if len(costs) == 1:
            peak_nbytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = answers[0]
    return {
        "counts": _counts(answer.proofs[NUM_GPUS]),
        "seconds": costs[0][0],
        "processor_seconds": costs[0][1],
        "again_seconds": costs[1][0],
        "peak_nbytes": peak_nbytes,
        "running_s": answer.own.step_time_s,
        "best": [_line(one) for one in answer.candidates[:NUM_BEST]],
    }


def _processor_s() -> float:
    """Of this process and of those that it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _counts(proof: Proof) -> dict[str, float]:
    """What became of the layouts."""
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
        "layout": told(one.config),
    }


def _priced(config: RunConfig, machine: Machine, layouts: Sequence[Told]) -> list[Any]:
    """Each layout's line, or why it is none here."""
    found: list[Any] = []
    for layout in layouts:
        try:
            (one,) = compare(
                config,
                [configured(config, layout)],
                machine.steps,
                memory_capacity_nbytes=machine.memory_capacity_nbytes or _CAPACITY_NBYTES,
                memory_offset_nbytes=machine.memory_offset_nbytes,
            )
            found.append(_line(one))
        except ForerunError as error:
            found.append({"refused": str(error), "layout": layout})
    return found


if __name__ == "__main__":
    main()
