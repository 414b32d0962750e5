"""Records of large worlds: packed lines, groups as runs, received files, summaries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.errors import RecordError
from forerun.calib.records.packed import Packer, from_runs, pack, to_runs, unpacked
from forerun.calib.records.rank_summary import StepSums, summarise
from forerun.calib.records.record_kinds import (
    SCHEMA,
    CollectiveRecord,
    Header,
    PhaseRecord,
    RankRecord,
    StepRecord,
    from_dict,
    to_dict,
)
from forerun.calib.samples.store import read_run, run_ids
from forerun.calib.workload.collectives import Collective, GroupRole


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=60).map(tuple))
def test_any_members_of_a_group_come_back(ranks: tuple[int, ...]) -> None:
    assert from_runs(to_runs(ranks)) == ranks


def test_groups_of_16384_ranks_are_short_and_one_object() -> None:
    for ranks in (tuple(range(16384)), tuple(range(7, 16384, 8))):
        text = to_runs(ranks)
        assert len(text) < 12
        assert from_runs(text) == ranks and from_runs(text) is from_runs(text)


@pytest.mark.parametrize("text", ["", "3-1", "1-9:0", "a", "1-2-3", "0-99999999", "-4", "²"])
def test_text_that_is_no_group_is_refused(text: str) -> None:
    with pytest.raises(RecordError, match="skipped"):
        from_runs(text)


def collective(ranks: tuple[int, ...]) -> CollectiveRecord:
    return CollectiveRecord(
        step=1,
        window=0,
        collective=Collective.ALL_REDUCE,
        role=GroupRole.DP,
        group="dp#1",
        ranks=ranks,
        nbytes=4,
        sequence=0,
        peer=-1,
        is_async=False,
        is_bound=False,
        issue_ns=5,
        duration_ns=7,
        exposed_ns=6,
    )


@pytest.mark.parametrize("num_ranks", [2, 8, 9, 16384])
def test_large_groups_are_written_as_runs_and_small_ones_as_ever(num_ranks: int) -> None:
    record = collective(tuple(range(num_ranks)))
    text = json.dumps(to_dict(record))
    assert len(text) < 400
    assert isinstance(json.loads(text)["ranks"], list) == (num_ranks <= 8)
    assert from_dict(json.loads(text)) == record


@pytest.mark.slow
@given(st.lists(st.lists(st.text(max_size=50), max_size=5), max_size=20), st.integers(80, 4000))
def test_a_packer_keeps_its_bound_and_whole_batches(batches: list[list[str]], limit: int) -> None:
    lines = [[json.dumps(text) + "\n" for text in batch] for batch in batches]
    packer = Packer(limit)
    packed_lines = [line for batch in lines if packer.add(batch) for line in batch]
    line = packer.line()
    assert len(line) <= limit
    assert list(unpacked([line])) == packed_lines


def test_a_damaged_packed_line_is_left_as_it_is() -> None:
    line = pack(["a\n"])
    for damaged in (line[:-9], line.replace('": "', '": "!'), line.replace('": "', '": "AAAA')):
        assert list(unpacked(["x\n", damaged])) == ["x\n", damaged]


def phase(name: str, duration_ns: int, wait_ns: int = 0) -> PhaseRecord:
    return PhaseRecord(
        step=1,
        window=0,
        name=name,
        microbatch=0,
        start_ns=0,
        duration_ns=duration_ns,
        wait_ns=wait_ns,
        hook_ns=1,
    )


def test_a_summary_has_medians_of_what_each_step_took() -> None:
    sums = {}
    for step, extra in ((3, 0), (5, 10), (7, 1000), (9, 5)):
        sums[step] = StepSums()
        for record in (
            phase("forward-compute", 101 + extra),
            phase("forward-compute", 101),
            phase("backward-compute", 301, wait_ns=100),
            phase("optimizer", 51),
            phase("all-grads-sync", 999),
            collective((0, 1)),
            collective((0, 1)),
            collective((0,)),
        ):
            sums[step].add(record)
    step_ns = {3: 1000, 5: 1010, 7: 2000, 11: 1}
    rank_record = summarise(2, step_ns, sums, memory_peak_nbytes=9)
    assert rank_record == RankRecord(
        window=2,
        num_steps=3,
        step_ns=1010,
        forward_ns=210,
        backward_ns=200,
        optimizer_ns=50,
        wait_roles=("dp",),
        wait_ns=(12,),
        memory_peak_nbytes=9,
    )
    assert summarise(0, {}, {}, 0).num_steps == 0


def header(rank: int) -> str:
    record = Header(
        schema=SCHEMA,
        run_id="r",
        rank=rank,
        world_size=16,
        created_by="t",
        device="cpu",
        started_unix_s=1.0,
    )
    return json.dumps(to_dict(record)) + "\n"


def step(number: int) -> str:
    record = StepRecord(step=number, window=0, start_ns=1, duration_ns=2, gap_ns=0, is_hooked=False)
    return json.dumps(to_dict(record)) + "\n"


def summary(rank: int) -> str:
    return json.dumps({**to_dict(summarise(0, {}, {}, rank)), "rank": rank}) + "\n"


def test_own_files_win_over_received_ones_and_summaries_are_joined(tmp_path: Path) -> None:
    folder = tmp_path / "records" / "r"
    folder.mkdir(parents=True)
    (folder / "rank-00000.jsonl").write_text(header(0) + pack([step(1), summary(0)]))
    (folder / "received-00000.jsonl").write_text(header(0) + pack([step(9)]))
    (folder / "received-00008.jsonl").write_text(header(8) + step(2) + header(8) + pack([step(3)]))
    (folder / "summaries.jsonl").write_text(pack([summary(5), summary(6)]) + "{}\n")
    assert run_ids(tmp_path) == ("r",)
    run = read_run(tmp_path)
    steps = {
        rank: [record.step for record in records if isinstance(record, StepRecord)]
        for rank, records in run.records.items()
    }
    assert steps == {0: [1], 8: [2, 3]}
    peaks = {
        rank: [s.memory_peak_nbytes for s in records] for rank, records in run.summaries.items()
    }
    assert peaks == {0: [0], 5: [5], 6: [6], 8: []}
    assert any(problem.startswith("summaries.jsonl:3") for problem in run.problems)
    assert "records of 2 of 16 ranks" in run.problems
