"""Programs against the schedules of real megatron.core: passes, posts and waits in their order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from forerun.calib.timeline.programs import Item, Message, Pass, Pipeline, Post, sender
from forerun.calib.timeline.schedules import stage_program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
]

PROBE = Path(__file__).parent / "schedule_probe.py"
ENDS = ("send_prev", "recv_prev", "send_next", "recv_next")
SIZES = [
    # Stages, virtual stages, micro-batches, group.
    (1, 1, 3, 0),
    (2, 1, 1, 0),
    (4, 1, 2, 0),
    (4, 1, 9, 0),
    (2, 2, 2, 0),
    (2, 2, 6, 0),
    (2, 3, 8, 4),
    (2, 2, 5, 3),
    (3, 2, 7, 4),
    (4, 2, 4, 0),
    (4, 2, 8, 0),
    (4, 3, 8, 8),
    (4, 2, 10, 6),
    (4, 4, 13, 9),
    (8, 4, 64, 0),
    (16, 2, 36, 20),
]
PIPELINES = [
    Pipeline(
        num_stages=stages,
        num_virtual_stages=virtual,
        num_microbatches=microbatches,
        microbatch_group_size=group,
        overlaps_p2p=overlaps,
        overlaps_p2p_ends=overlaps_ends,
    )
    for stages, virtual, microbatches, group in SIZES
    for overlaps, overlaps_ends in ((True, False), (True, True), (False, False))
    if overlaps or (stages > 2 and virtual > 1)
    if virtual > 1 or not overlaps_ends
]


@pytest.fixture(scope="module")
def logs() -> dict[Pipeline, list[list[list[Any]]]]:
    cases = [asdict(p) for p in PIPELINES]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROBE), json.dumps(cases)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return dict(zip(PIPELINES, json.loads(line.removeprefix("RESULT")), strict=True))


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_a_stage_does_what_megatron_does_in_the_same_order(
    pipeline: Pipeline, logs: dict[Pipeline, list[list[list[Any]]]]
) -> None:
    for stage, recorded in enumerate(logs[pipeline]):
        assert as_logged(stage_program(pipeline, stage), stage, pipeline) == settled(recorded)


def as_logged(program: tuple[Item, ...], stage: int, pipeline: Pipeline) -> list[list[Any]]:
    """A program in the words of the probe: which end of which neighbour, and its how-many-eth."""
    counts: Counter[str] = Counter()
    names: dict[Message, list[Any]] = {}
    out: list[list[Any]] = []
    for item in program:
        if isinstance(item, Pass):
            out.append([item.kind.value, item.chunk, item.microbatch])
        elif isinstance(item, Post):
            ends = {message: end(message, stage, pipeline) for message in item.messages}
            for message, name in ends.items():
                names[message] = [name, counts[name]]
                counts[name] += 1
            out.append(["post", *sorted(ends.values(), key=ENDS.index)])
        else:
            out += [["wait", *names[message]] for message in item.messages]
    return settled(out)


def end(message: Message, stage: int, pipeline: Pipeline) -> str:
    """An activation goes to the next stage, a gradient to the one before."""
    is_sender = stage_sends(message, stage, pipeline)
    if message.is_gradient:
        return "send_prev" if is_sender else "recv_next"
    return "send_next" if is_sender else "recv_prev"


def stage_sends(message: Message, stage: int, pipeline: Pipeline) -> bool:
    return sender(message, pipeline.num_stages) == stage


def settled(log: list[list[Any]]) -> list[list[Any]]:
    """Waits that follow each other in one order: all must be over before what comes next."""
    out: list[list[Any]] = []
    waits: list[list[Any]] = []
    for entry in [*log, ["end"]]:
        if entry[0] == "wait":
            waits.append(entry)
        else:
            out += [*sorted(waits), entry]
            waits = []
    return out
