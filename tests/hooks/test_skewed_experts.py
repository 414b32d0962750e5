"""Two real ranks with experts and a router that prefers the first rank's.

Tokens go another way only in Megatron's own exchange between real ranks.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
from launched import torchrun

from forerun.calib.answers.run_measurements import Measurements
from forerun.calib.marks.run_records import RunRecords
from forerun.calib.records.record_kinds import OperatorRecord
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.calib.workload.operators import OperatorKind, Phase
from forerun.calib.workload.routing import imbalance
from forerun.launch.cli import ExitCode, main

pytest.importorskip("megatron")
pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "support" / "skewed_experts.py"
LAYERS, MICROBATCHES, ITERS = 2, 2, 9
BIAS = 0.1
"""As large as the logits of weights that were just drawn: some tokens change their experts."""
SMALL = "--hidden-size 32 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 --mock-data "
SMALL += f"--train-iters {ITERS} --log-interval 1 --num-layers {LAYERS} --disable-bias-linear"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp("experts")
    flags = ("--calibrate", "--calibrate-steps=4", "--calibrate-wandb=off")
    done = torchrun(
        *(directory, str(SCRIPT), BIAS, *SMALL.split(), *flags),
        f"--calibrate-dir={directory / 'out'}",
    )
    return done.stdout, directory / "out"


def printed_rows(output: str) -> dict[tuple[int, int, int, int], int]:
    """Rows by rank, step, micro-batch and layer, as the experts themselves saw them."""
    lines: dict[int, list[int]] = defaultdict(list)
    for rank, rows in re.findall(r"ROWS (\d) (\d+)", output):
        lines[int(rank)].append(int(rows))
    result = {}
    for rank, rows in lines.items():
        for number, arrived in enumerate(rows[: ITERS * MICROBATCHES * LAYERS]):
            passed, layer = divmod(number, LAYERS)
            result[(rank, *divmod(passed, MICROBATCHES), layer)] = arrived
    return result


def recorded(run: RunRecords) -> dict[tuple[int, int, int, int], int]:
    result: dict[tuple[int, int, int, int], int] = defaultdict(int)
    for rank, records in run.records.items():
        for r in records:
            is_fc1 = isinstance(r, OperatorRecord) and r.kind is OperatorKind.LINEAR_FC1
            if is_fc1 and r.phase is Phase.FORWARD:
                result[rank, r.step, r.microbatch, r.layer] += r.shape[0]
    return result


def test_rows_on_record_are_those_that_arrived(trained: tuple[str, Path]) -> None:
    seen, truth = recorded(read_run(trained[1])), printed_rows(trained[0])
    assert len(seen) >= 2 * LAYERS * 2
    assert seen == {key: truth[key] for key in seen}


def test_the_imbalance_is_that_of_the_busiest_rank(trained: tuple[str, Path]) -> None:
    run = read_run(trained[1])
    result, truth = Measurements(table=build_table(run)).routing, recorded(run)
    passes = {key[1:] for key in truth}
    most = sum(max(truth[(0, *key)], truth[(1, *key)]) for key in passes)
    assert result is not None
    assert result.imbalance == pytest.approx(2 * most / sum(truth.values()))
    assert result.imbalance > 1.1 and result.busiest_rank == 0
    assert set(result.by_layer) == set(range(LAYERS))


def test_what_was_counted_goes_with_the_layout(
    trained: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """One of two ranks, one of four with an expert each, and one rank with all of them."""
    run = read_run(trained[1])
    measured = Measurements(table=build_table(run))
    experts, result = measured.config.model.experts, measured.routing
    assert experts is not None and result is not None
    assert imbalance(experts, 2) == pytest.approx(result.imbalance)
    assert imbalance(experts, 4) >= imbalance(experts, 2) > imbalance(experts, 1) == 1.0
    sources = {"1": "one rank", "2": "measured"}
    for ep, source in sources.items():
        main(["predict", str(trained[1]), "--json", "--expert-model-parallel-size", ep])
        routing = json.loads(capsys.readouterr().out)["routing"]
        assert routing["source"] == source
        assert routing["imbalance"] == pytest.approx(imbalance(experts, int(ep)))


def test_every_rank_sends_what_arrived(trained: tuple[str, Path]) -> None:
    run = read_run(trained[1])
    steps = defaultdict(int)
    for (rank, step, _, _), rows in recorded(run).items():
        steps[rank, step] += rows
    sent = build_table(run).ranks.set_index("rank")["routed_rows"]
    for rank in (0, 1):
        rows = [arrived for (place, _), arrived in steps.items() if place == rank]
        assert min(rows) <= sent[rank] <= max(rows)


def test_the_run_is_told_what_its_imbalance_costs(trained: tuple[str, Path]) -> None:
    # Beside a busy neighbour the companion may leave before its last answer is ready.
    assert main(["report", str(trained[1])]) == ExitCode.ANSWER
    decision = json.loads((trained[1] / "latest" / "decision.json").read_text())
    (line,) = [line for line in decision["transcript"] if "routing:" in line]
    share = re.search(r"imbalance costs (\S+) % of the step", line)
    assert share is not None and 0.0 < float(share[1]) < 100.0
