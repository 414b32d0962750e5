"""Payloads against the bus bandwidths that the sources publish beside their times."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import pytest

from forerun.benchmarks.published.readers import read_published

Golden = Callable[[str], tuple[pd.DataFrame, pd.DataFrame]]


def bus_bandwidths(rows: pd.DataFrame) -> pd.Series:
    """GB/s by the definition of nccl-tests."""
    ranks = rows["num_ranks"]
    factor = pd.Series(1.0, index=rows.index)
    factor = factor.where(rows["collective"] != "all_reduce", 2 * (ranks - 1) / ranks)
    partial = rows["collective"].isin(["all_gather", "reduce_scatter", "all_to_all"])
    factor = factor.where(~partial, (ranks - 1) / ranks)
    return rows["nbytes"] * factor / rows["time_s"] / 1e9


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("coll_ett", "busbw_gb_s_derived"),
        ("coll_nccltests_public", "busbw_gb_s_oop"),
        ("coll_aic_nccl_intranode", "busbw_gb_s_derived"),
        ("coll_vtrain_allreduce_intranode", "busbw_gb_s_oop"),
    ],
)
def test_payloads_give_the_published_bus_bandwidth(golden: Golden, name: str, column: str) -> None:
    frame, rows = golden(name)
    assert len(rows) == len(frame)
    # Published with two or three digits behind the point.
    expected = frame[column].tolist()
    assert bus_bandwidths(rows).tolist() == pytest.approx(expected, rel=2e-3, abs=6e-3)


def test_aceso_counts_the_gathered_output_and_flags_small_sizes(golden: Golden) -> None:
    frame, rows = golden("coll_aceso")
    is_timed = frame["time_us"].notna() & (rows["flag"] == "")
    expected = frame.loc[is_timed, "busbw_gb_s_from_truncated_size"].tolist()
    assert bus_bandwidths(rows[is_timed]).tolist() == pytest.approx(expected, rel=1e-2)
    is_small = (frame["size_mib_truncated"] < 16) & (frame["op"] != "send_recv")
    assert (rows.loc[is_small, "flag"] != "").all()
    assert (rows.loc[frame["time_us"] >= 1e8, "flag"] == "failed").all()
    sends = rows[frame["op"] == "send_recv"]
    assert (sends["nbytes"] / sends["time_s"] / 1e9).tolist() == pytest.approx(
        frame.loc[frame["op"] == "send_recv", "bandwidth_gb_s"].tolist()
    )


def test_deepep_gives_dispatch_and_combine(golden: Golden) -> None:
    frame, rows = golden("coll_aic_deepep_alltoall")
    assert len(rows) == 2 * len(frame) and set(rows["collective"]) == {"all_to_all"}
    is_low = rows["fabric"].str.contains("low_latency")
    rate = rows[is_low]["nbytes"] / rows[is_low]["time_s"] / 1e9
    low = frame[frame["mode"] == "low_latency"]
    published = [*low["dispatch_bandwidth_gbps"], *low["combine_bandwidth_gbps"]]
    # The source counts the tokens that its random routing really sent.
    assert rate.tolist() == pytest.approx(published, rel=0.05)


def test_environments_are_fabrics(golden: Golden) -> None:
    frame, _ = golden("coll_nccltests_public")
    from forerun.benchmarks.published.collectives import read_nccl_tests

    rows = read_nccl_tests(frame.assign(env_setup=["(1)", "(4)"] * (len(frame) // 2) + ["(1)"]))
    assert set(rows["fabric"]) == {
        "xxrjun-example-cluster01 (1) NCCL 22902",
        "xxrjun-example-cluster01 (4) NCCL 22902",
    }


def test_copied_series_are_flagged(golden: Golden) -> None:
    frame, rows = golden("coll_vidur")
    is_copied = frame["same_numbers_in_other_topology"]
    assert ((rows["flag"] != "") == is_copied).all()


def test_nodes_come_from_ranks_where_they_are_missing(golden: Golden) -> None:
    frame, rows = golden("coll_vidur")
    reread = read_published(frame.drop(columns="nodes"), "a")
    assert reread["num_nodes"].tolist() == rows["num_nodes"].tolist()
