"""``--cluster`` reaches the answer of every verb by the one step model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.calib.records.cluster import Cluster, SeenNode, StatedNodes
from forerun.launch.cli import ExitCode, main
from forerun.launch.known.machines import open_machine
from tests.launch.known.test_carried_over import GOLDEN, H100, copy_as

GB200 = "NVIDIA GB200"
SLOW = '{"num_gpus": 2, "num_cards": 1, "card_bytes_per_s": 1e9}'
assert GOLDEN.is_dir()


def predicted(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, object]:
    layout = ("--gpus", "16", "--micro-batch-size", "1", "--json")
    assert main(["predict", *argv, *layout]) == ExitCode.ANSWER
    out = capsys.readouterr().out
    result: dict[str, object] = json.loads(out)
    return result


@pytest.mark.slow
def test_slow_cards_are_slow_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy_as(tmp_path, "run", H100)
    cluster = tmp_path / "cluster.json"
    cluster.write_text(SLOW)
    usual = predicted(capsys, str(tmp_path))
    slow = predicted(capsys, str(tmp_path), "--cluster", str(cluster))
    repeated = predicted(capsys, str(tmp_path))
    assert float(str(slow["step_time_s"])) > float(str(usual["step_time_s"]))
    assert repeated == usual
    figures = slow["network"]
    assert isinstance(figures, dict)
    assert figures["num_cards"] == {"value": 1, "origin": "stated"}
    assert figures["domain"]["origin"] == "prior"


def test_a_rack_joins_hosts(tmp_path: Path) -> None:
    copy_as(tmp_path, "run", H100)
    times = {}
    for domain in (72, 2):
        nodes = StatedNodes(domain=domain, num_gpus=2)
        machine = open_machine(tmp_path, device=GB200, stated=nodes)
        wide = replace(machine.running.parallelism, dp=16)
        batch = replace(machine.running.batch, micro_batch_size=1)
        assert wide.ranks_per_node == domain
        step = machine.steps.estimate(replace(machine.running, parallelism=wide, batch=batch))
        times[domain] = step.time_s
    assert times[2] > times[72]
    assert open_machine(tmp_path, device=GB200).running.parallelism.ranks_per_node == 72


def test_another_device_is_on_its_own_nodes(tmp_path: Path) -> None:
    copy_as(tmp_path, "run", H100)
    moved = open_machine(tmp_path, device=GB200, stated=StatedNodes(domain=36))
    assert moved.running.parallelism.ranks_per_node == 36
    known = moved.steps.base.conditions.network
    assert known is not None and known.links is not None
    assert known.links.topology.domain == 36


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"num_cards": "many"}', ("num_cards", "'many'", "whole number")),
        ('{"cards": 8}', ("'cards'", "num_cards")),
        ("[8]", ("no JSON object", "num_cards")),
        ("{", ("not JSON",)),
        ('{"joint": "torus"}', ("'torus'", "switch")),
        (" " * (2 << 20), ("1 MiB",)),
    ],
)
@pytest.mark.parametrize("verb", ["predict", "plan"])
def test_a_wrong_file_is_refused_with_the_rule(
    verb: str, text: str, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "cluster.json"
    cluster.write_text(text)
    copy_as(tmp_path, "run", H100)
    assert main([verb, str(tmp_path), "--cluster", str(cluster)]) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert all(word in err for word in (*words, "cluster.json")), err


def test_a_file_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.json"
    copy_as(tmp_path, "run", H100)
    assert main(["predict", str(tmp_path), "--cluster", str(path)]) == ExitCode.USAGE
    assert "none.json" in capsys.readouterr().err


def plant_cluster(home: Path, node: SeenNode, stated: StatedNodes | None = None) -> None:
    """As if the run's first rank had seen this node."""
    cluster = Cluster(seen=(node,), stated=stated or StatedNodes()).to_json()
    (path,) = (home / "records").glob("*/rank-00000.jsonl")
    head, _, rest = path.read_text(encoding="utf-8").partition("\n")
    path.write_text(json.dumps({**json.loads(head), "cluster": cluster}) + "\n" + rest)


@pytest.mark.slow
def test_what_the_run_saw_is_priced_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One card of 10 Gb/s for two GPUs; what was stated to the run goes before that."""
    copy_as(tmp_path, "run", H100)
    node = SeenNode(
        num_ranks=2, num_local_ranks=2, num_gpus=2, num_cards=1, card_bytes_per_s=1.25e9
    )
    stated = StatedNodes(num_gpus=2)
    times = {}
    for name, seen, nodes in (
        ("usual", SeenNode(num_local_ranks=2), stated),
        ("slow", node, stated),
        ("stated", node, StatedNodes(num_gpus=2, num_cards=2, card_bytes_per_s=50e9)),
    ):
        plant_cluster(tmp_path, seen, nodes)
        result = predicted(capsys, str(tmp_path))
        times[name] = float(str(result["step_time_s"]))
        figures = result["network"]
        assert isinstance(figures, dict)
        if name != "usual":
            origin = "seen" if name == "slow" else "stated"
            assert figures["num_cards"]["origin"] == origin
    assert times["slow"] > times["usual"] >= times["stated"]


def test_the_report_has_one_line_on_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy_as(tmp_path, "run", H100)
    plant_cluster(
        tmp_path, SeenNode(num_local_ranks=2, num_gpus=4, num_cards=4, card_bytes_per_s=25e9)
    )
    assert main(["report", str(tmp_path), "--json"]) in (ExitCode.ANSWER, ExitCode.THRESHOLD)
    answer = json.loads(capsys.readouterr().out)
    lines = [line for line in answer["decision"]["transcript"] if "network:" in line]
    assert lines == [
        "[forerun] network: 4 cards of 22.5 GB/s for 4 GPUs (seen), NVLink domain 4 (prior)"
    ]
    assert answer["calibration"]["network"]["num_gpus"] == {"value": 4, "origin": "seen"}
