"""Nodes of recorded groups, and messages of the pipeline over whatever group they went."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from planted_stragglers import table_of

from forerun.calib.fit.measured_rows import measured_collectives
from forerun.calib.samples._transfers import collective_rows, match_ranks
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.calib.workload.config import Parallelism
from forerun.calib.workload.ranks import group, num_nodes


def event(rank: int, collective: str, role: str, ranks: tuple[int, ...], peer: int = -1) -> dict:
    return {
        **{"window": 0, "step": 0, "rank": rank, "collective": collective, "role": role},
        **{"group": role, "ranks": ",".join(map(str, ranks)), "nbytes": 4096, "sequence": 0},
        **{"peer": peer, "is_bound": False, "time_s": 1e-3, "exposed_s": 1e-3},
    }


def events_of_group(layout: Parallelism, role: GroupRole) -> pd.DataFrame:
    ranks = group(layout, role, 0)
    return pd.DataFrame([event(rank, "all_reduce", role.value, ranks) for rank in ranks])


STRIDED = [
    # Ranks 0, 8, 16, 24: four nodes of 8 where the span of 25 ranks says four as well.
    (Parallelism(tp=8, dp=4, ranks_per_node=8), GroupRole.DP, 4),
    # Data parallel before the pipeline, two context ranks side by side: 0, 2, 32, 34 ...
    (
        Parallelism(tp=2, cp=2, pp=8, dp=2, is_pipeline_before_data=True, ranks_per_node=8),
        GroupRole.DP,
        2,
    ),
    (Parallelism(tp=2, pp=4, dp=2, ranks_per_node=4), GroupRole.PP, 4),
    (Parallelism(tp=8, pp=2, ranks_per_node=8), GroupRole.TP, 1),
]


@pytest.mark.parametrize(("layout", "role", "wanted"), STRIDED)
def test_nodes_are_those_that_the_group_touches(
    layout: Parallelism, role: GroupRole, wanted: int
) -> None:
    matched = match_ranks(events_of_group(layout, role), layout)
    assert matched["num_nodes"].unique().tolist() == [wanted] == [num_nodes(layout, role)]
    assert collective_rows(matched)["num_nodes"].tolist() == [wanted]


def test_models_are_fitted_on_counted_nodes_and_on_the_span_where_none_were() -> None:
    layout = Parallelism(tp=2, cp=2, pp=8, dp=2, is_pipeline_before_data=True, ranks_per_node=8)
    rows = collective_rows(match_ranks(events_of_group(layout, GroupRole.DP), layout))
    rows = rows.assign(row="collective", count=1)
    (call,) = measured_collectives(table_of(layout, samples=rows))
    assert (call.num_ranks, call.num_nodes) == (4, 2)
    (old,) = measured_collectives(table_of(layout, samples=rows.assign(num_nodes=0)))
    assert old.num_nodes == 4


def test_without_ranks_per_node_nothing_is_counted() -> None:
    layout = Parallelism(tp=2, dp=4)
    assert match_ranks(events_of_group(layout, GroupRole.DP), layout)["num_nodes"].eq(0).all()
    assert match_ranks(events_of_group(layout, GroupRole.DP))["num_nodes"].eq(0).all()


BUCKETS_MS = (4.0, 4.0, 4.0, 2.0, 4.0)
ISSUED_MS = {0: (1.0, 2.0, 3.0, 4.0, 30.0), 1: (0.0, 2.5, 2.6, 7.0, 29.0)}


def buckets(known: dict[int, tuple[bool, ...]]) -> pd.DataFrame:
    """Overlapped gradients of two ranks, whose clocks differ by a minute."""
    begun_ms, rows = [], []
    end_ms = 0.0
    for place, lasts_ms in enumerate(BUCKETS_MS):
        begun_ms.append(max(end_ms, *(times[place] for times in ISSUED_MS.values())))
        end_ms = begun_ms[-1] + lasts_ms
    for rank, issued_ms in ISSUED_MS.items():
        for place, issue_ms in enumerate(issued_ms):
            waited_ms = begun_ms[place] + BUCKETS_MS[place] - issue_ms
            late_ms = 0.0 if known[rank][place] else 5.0
            rows.append(
                event(rank, "reduce_scatter", "dp", (0, 1))
                | {"sequence": place, "is_async": True, "is_bound": not known[rank][place]}
                | {"nbytes": 2**20 * (place + 1), "exposed_s": 0.0}
                | {"issue_ns": int(issue_ms * 1e6) + 60 * 10**9 * rank}
                | {"time_s": (waited_ms + late_ms) / 1e3}
            )
    return pd.DataFrame(rows)


def test_m6_a_bucket_behind_others_takes_the_time_from_their_end_on() -> None:
    """Up to 13 ms of 4 before: the time from the call on."""
    matched = match_ranks(buckets({0: (True,) * 5, 1: (True,) * 5}), is_queued=True)
    series = matched.groupby("sequence")["transfer_s"].first()
    assert series.tolist() == pytest.approx([ms / 1e3 for ms in BUCKETS_MS])
    before = match_ranks(buckets({0: (True,) * 5, 1: (True,) * 5}))
    assert before["time_s"].tolist() == matched["time_s"].tolist()
    assert before.groupby("sequence")["transfer_s"].first().max() > 0.009


def test_m6_behind_an_unknown_end_nothing_is_taken_off() -> None:
    known = {0: (True, False, True, True, True), 1: (False,) * 5}
    matched = match_ranks(buckets(known), is_queued=True)
    series = matched.groupby("sequence")["transfer_s"].first()
    assert (
        matched.groupby("sequence")["is_unsure"].first().tolist()
        == [False] * 2 + [True] + [False] * 2
    )
    # Behind the first alone: the second's end is not known.
    assert series.tolist()[2:] == pytest.approx([0.008, 0.002, 0.004])
    assert (series >= np.array(BUCKETS_MS) / 1e3 - 1e-9).all()


def test_m6_what_ends_out_of_order_is_no_queue() -> None:
    events = buckets({0: (True,) * 5, 1: (True,) * 5})
    events.loc[events["sequence"] == 0, "time_s"] = 0.1
    matched = match_ranks(events, is_queued=True)
    assert matched["transfer_s"].tolist() == match_ranks(events)["transfer_s"].tolist()


def test_m6_synchronous_calls_messages_and_other_groups_do_not_queue() -> None:
    events = buckets({0: (True,) * 5, 1: (True,) * 5})
    others = [
        events.assign(is_async=False),
        events.assign(group=events["sequence"].astype(str)),
        events.assign(collective="send", peer=1 - events["rank"]),
    ]
    for changed in others:
        matched = match_ranks(changed, is_queued=True)
        assert matched["transfer_s"].tolist() == match_ranks(changed)["transfer_s"].tolist()


def pair(role: str, source: int, target: int, ranks: tuple[int, ...]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            event(source, "send", role, ranks, peer=target),
            event(target, "recv", role, ranks, peer=source),
        ]
    )


@pytest.mark.parametrize(
    ("layout", "source", "target", "role", "wanted"),
    [
        (Parallelism(pp=2, vp=2, dp=2), 2, 0, "world", "pp"),
        (Parallelism(pp=4), 3, 0, "world", "pp"),
        (Parallelism(pp=4), 0, 2, "world", "world"),
        (Parallelism(pp=2, dp=2), 0, 1, "world", "world"),
        (Parallelism(cp=2, pp=2), 0, 1, "cp", "cp"),
        (None, 2, 0, "world", "world"),
    ],
)
def test_messages_between_neighbouring_stages_are_the_pipelines(
    layout: Parallelism | None, source: int, target: int, role: str, wanted: str
) -> None:
    matched = match_ranks(pair(role, source, target, (0, 1, 2, 3)), layout)
    assert matched["role"].tolist() == [wanted] * 2
    assert matched["collective"].unique().tolist() == [Collective.SEND.value]
    assert matched["num_ranks"].tolist() == [2, 2]


def test_a_message_between_nodes_is_on_two() -> None:
    layout = Parallelism(tp=4, pp=2, ranks_per_node=4)
    assert match_ranks(pair("pp", 1, 5, (1, 5)), layout)["num_nodes"].tolist() == [2, 2]
    one = Parallelism(tp=4, pp=2, ranks_per_node=8)
    assert match_ranks(pair("pp", 1, 5, (1, 5)), one)["num_nodes"].tolist() == [1, 1]
