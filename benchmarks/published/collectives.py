"""Readers of published tables of collectives, one for each family of tables.

Payloads are counted as in nccl-tests: the gathered buffer for all-gather, the reduced input for
reduce-scatter, the tensor for all-reduce, the total sent by one rank for all-to-all, the message
for send.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd

from forerun.benchmarks.published.rows import (
    add_flag,
    collective_rows,
    family,
    joined,
    numbers,
    texts,
)
from forerun.calib.importers.canonical_tables import CHOSEN, MICROSECOND_S
from forerun.calib.workload.collectives import Collective

_COLLECTIVES = {
    "allreduce": Collective.ALL_REDUCE,
    "allgather": Collective.ALL_GATHER,
    "reducescatter": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
    "sendrecv": Collective.SEND,
    "p2p": Collective.SEND,
}
"""Canonical collective by its published name without underscores."""
_VIDUR_BOARDS = {
    "a100_dgx": "SXM4",
    "h100_dgx": "SXM5",
    "a100_pairwise_nvlink": "PCIe",
    "h100_pairwise_nvlink": "PCIe",
}
_GATHERS = (Collective.ALL_GATHER.value, Collective.REDUCE_SCATTER.value)
_GIGABYTE = 1e9
_OUT_OF_PLACE_FIRST = ("time_us_oop", "time_us_ip")
_TRUNCATED_BELOW_MIB = 16
"""Size in MiB below which truncation to whole MiB is off by more than 6 %."""
_FAILED_S = 100.0
"""Upper limit of valid times: failed measurements were published as absurd ones (1e9 in their
unit)."""
_FP8_DISPATCH_NBYTES = 1 + 4 / 128
"""Bytes per element: one, plus a four-byte scale for each 128 elements."""
_BF16_NBYTES = 2


def read_ett(frame: pd.DataFrame) -> pd.DataFrame:
    """Read sweeps of a cluster by estimate-train-time; sizes are the contribution of one rank."""
    ranks = numbers(frame, "ranks").where(_collectives(frame).isin(_GATHERS), 1)
    return _rows(
        frame,
        fabric=("cluster",),
        nbytes=numbers(frame, "bytes_per_rank") * ranks,
    )


def read_nccl_tests(frame: pd.DataFrame) -> pd.DataFrame:
    """Read logs of nccl-tests: the out-of-place time.

    A cluster in another environment (plug-in, NCCL version) is another fabric: fall-backs to TCP
    among them are slower by factors.
    """
    number = texts(frame, "nccl_version").str.removesuffix(".0")
    return _rows(
        frame.assign(_version=number.where(number == "", "NCCL " + number)),
        device="device",
        fabric=("cluster", "env_setup", "_version"),
        nbytes="bytes_nccltests_size",
        times_us=_OUT_OF_PLACE_FIRST,
    )


def read_vtrain(frame: pd.DataFrame) -> pd.DataFrame:
    """Read vTrain's all-reduce tables within a node: the out-of-place time."""
    return _rows(
        frame.assign(_place="node"),
        fabric=("gpu", "_place"),
        nbytes="bytes",
        times_us=_OUT_OF_PLACE_FIRST,
    )


def read_vidur(frame: pd.DataFrame) -> pd.DataFrame:
    """Read sweeps of vidur; the topology's name gives the card of its GPU: boards of a DGX, or PCIe
    cards that NVLink joins in pairs (Azure NC96ads A100 v4)."""
    board = texts(frame, "topology").map(_VIDUR_BOARDS).fillna("")
    named = frame.assign(_device=(texts(frame, "gpu") + " " + board).str.strip())
    fabric, times_us = ("topology",), ("time_us_median",)
    return _rows(named, device="_device", fabric=fabric, nbytes="bytes", times_us=times_us)


def read_aceso(frame: pd.DataFrame) -> pd.DataFrame:
    """Read profiles of Aceso and of users of its profiler (each repository is a fabric).

    Sizes were truncated to whole MiB, so small ones are flagged; point-to-point rows are exact, but
    published as a bandwidth.
    """
    nbytes = numbers(frame, "total_bytes_approx")
    by_rate = nbytes / (numbers(frame, "bandwidth_gb_s") * _GIGABYTE)
    out = _rows(frame, fabric=("gpu", "repo"), nbytes=nbytes, otherwise_s=by_rate)
    is_cut = numbers(frame, "size_mib_truncated") < _TRUNCATED_BELOW_MIB
    is_cut &= out["collective"] != Collective.SEND.value
    add_flag(out, is_cut, f"size truncated to MiB, below {_TRUNCATED_BELOW_MIB}")
    add_flag(out, out["time_s"] >= _FAILED_S, "failed")
    return out


def read_deepep(frame: pd.DataFrame) -> pd.DataFrame:
    """Read dispatch and combine of experts by DeepEP, as two all-to-alls; each row gives both.

    A rank sends fp8 with scales on dispatch and bf16 on combine.  In low-latency mode every one of
    the top-k selections of a token is sent; otherwise a token is sent once to each rank with one of
    them, on average ``ranks (1 - (1 - 1/ranks)^topk)`` under even routing, and between nodes once
    to each, as ``num_chosen`` gives.  The time covers transfer and notification.  Direction, mode
    and number of multiprocessors are part of the fabric.
    """
    ranks, topk = numbers(frame, "ranks"), numbers(frame, "num_topk")
    is_low_latency = texts(frame, "mode") == "low_latency"
    copies = topk.where(is_low_latency, ranks * (1 - (1 - 1 / ranks) ** topk))
    elements = numbers(frame, "tokens_per_rank") * numbers(frame, "hidden_size") * copies
    parts = []
    for way, nbytes in (("dispatch", _FP8_DISPATCH_NBYTES), ("combine", _BF16_NBYTES)):
        split = numbers(frame, f"{way}_transmit_us") + numbers(frame, f"{way}_notify_us").fillna(0)
        sms = numbers(frame, f"{way}_sms").map("{:.0f} SMs".format, na_action="ignore")
        named = frame.assign(_way=f"DeepEP {way}", _sms=sms)
        part = collective_rows(
            frame,
            device="device",
            fabric=joined(named, "system", "_way", "mode", "_sms", "sglang_version"),
            collective=pd.Series(Collective.ALL_TO_ALL.value, index=frame.index),
            nbytes=elements * nbytes,
            time_s=numbers(frame, f"{way}_avg_t_us").fillna(split) * MICROSECOND_S,
        )
        part[CHOSEN] = topk.where(~is_low_latency, 0).fillna(0).astype(np.int64).to_numpy()
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def _rows(
    frame: pd.DataFrame,
    *,
    device: str = "gpu",
    fabric: Sequence[str],
    nbytes: str | pd.Series,
    times_us: Sequence[str] = ("time_us",),
    otherwise_s: float | pd.Series = float("nan"),
) -> pd.DataFrame:
    """Return canonical rows; ``fabric`` columns are joined, the first valid ``times_us`` is
    taken."""
    return collective_rows(
        frame,
        device=device,
        fabric=joined(frame, *fabric),
        collective=_collectives(frame),
        nbytes=numbers(frame, nbytes) if isinstance(nbytes, str) else nbytes,
        time_s=(numbers(frame, *times_us) * MICROSECOND_S).fillna(otherwise_s),
    )


def _collectives(frame: pd.DataFrame) -> pd.Series:
    """Return canonical names; any other operation is ``other``, which is never fitted."""
    values = {name: collective.value for name, collective in _COLLECTIVES.items()}
    names = texts(frame, "op").str.lower().str.replace("_", "")
    return names.map(values).fillna(Collective.OTHER.value)


FAMILIES = (
    family("estimate-train-time collectives", "op ranks bytes_per_rank time_us cluster", read_ett),
    family("nccl-tests", "op ranks bytes_nccltests_size time_us_oop cluster", read_nccl_tests),
    family(
        "aiconfigurator collectives",
        "op ranks bytes_nccltests_size time_us system",
        # Intra-node; each library version is a fabric of its own.
        partial(
            _rows,
            device="system",
            fabric=("system", "library", "folder_version"),
            nbytes="bytes_nccltests_size",
        ),
    ),
    family("DeepEP", "ranks tokens_per_rank hidden_size num_topk mode", read_deepep),
    family(
        "vidur collectives",
        "op ranks bytes time_us_median topology",
        read_vidur,
    ),
    family("vTrain all-reduce", "op ranks bytes time_us_oop gpu", read_vtrain),
    family(
        "Aceso collectives", "op ranks size_mib_truncated total_bytes_approx time_us", read_aceso
    ),
)
