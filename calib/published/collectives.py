"""Readers of published tables of collectives, one for each family of tables.

Payloads are counted as nccl-tests does: the gathered buffer for all-gather, the reduced input for
reduce-scatter, the tensor for all-reduce, what one rank sends in all for all-to-all, the message
for send.
"""

from __future__ import annotations

import pandas as pd

from ..importers.columns import MICROSECOND_S, flags, joined, num_nodes, numbers, texts
from ..importers.own_format import TableFamily, add_flag, collective_rows
from ..workload.collectives import Collective

_COLLECTIVES = {
    "all_reduce": Collective.ALL_REDUCE,
    "allreduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "allgather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "reducescatter": Collective.REDUCE_SCATTER,
    "all_to_all": Collective.ALL_TO_ALL,
    "alltoall": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
    "send_recv": Collective.SEND,
    "sendrecv": Collective.SEND,
    "p2p": Collective.SEND,
}
_GATHERS = (Collective.ALL_GATHER.value, Collective.REDUCE_SCATTER.value)
_GIGABYTE = 1e9
_TRUNCATED_BELOW_MIB = 16
"""Below this a size cut to whole MiB is off by more than 6 %."""
_FAILED_S = 100.0
"""Failed measurements were published as absurd times (1e9 in their unit)."""
_FP8_DISPATCH_NBYTES = 1 + 4 / 128
"""One byte an element, and a four-byte scale for each 128 of them."""
_BF16_NBYTES = 2


def read_ett(frame: pd.DataFrame) -> pd.DataFrame:
    """Sweeps of a cluster by estimate-train-time; sizes there are what one rank contributes."""
    collective = _collectives(frame)
    ranks = numbers(frame, "ranks")
    return collective_rows(
        frame,
        device=texts(frame, "gpu"),
        fabric=texts(frame, "cluster"),
        collective=collective,
        num_ranks=ranks,
        num_nodes=num_nodes(frame, ranks),
        nbytes=numbers(frame, "bytes_per_rank") * ranks.where(collective.isin(_GATHERS), 1),
        time_s=numbers(frame, "time_us") * MICROSECOND_S,
        flag=flags(frame),
    )


def read_nccl_tests(frame: pd.DataFrame) -> pd.DataFrame:
    """Logs of nccl-tests, their out-of-place time.

    A cluster in another environment (plug-in, NCCL version) is another fabric: the fall-backs to
    TCP among them are slower by factors.
    """
    ranks = numbers(frame, "ranks")
    number = texts(frame, "nccl_version").str.removesuffix(".0")
    version = number.where(number == "", "NCCL " + number)
    named = frame.assign(_version=version)
    return collective_rows(
        frame,
        device=texts(frame, "device"),
        fabric=joined(named, ["cluster", "env_setup", "_version"]),
        collective=_collectives(frame),
        num_ranks=ranks,
        num_nodes=num_nodes(frame, ranks),
        nbytes=numbers(frame, "bytes_nccltests_size"),
        time_s=numbers(frame, "time_us_oop").fillna(numbers(frame, "time_us_ip")) * MICROSECOND_S,
        flag=flags(frame),
    )


def read_aiconfigurator(frame: pd.DataFrame) -> pd.DataFrame:
    """Tables of aiconfigurator inside a node; each library version is a fabric of its own."""
    ranks = numbers(frame, "ranks")
    return collective_rows(
        frame,
        device=texts(frame, "system"),
        fabric=joined(frame, ["system", "library", "folder_version"]),
        collective=_collectives(frame),
        num_ranks=ranks,
        num_nodes=num_nodes(frame, ranks),
        nbytes=numbers(frame, "bytes_nccltests_size"),
        time_s=numbers(frame, "time_us") * MICROSECOND_S,
        flag=flags(frame),
    )


def read_deepep(frame: pd.DataFrame) -> pd.DataFrame:
    """Dispatch and combine of experts by DeepEP, as two all-to-alls; each row gives both.

    A rank sends fp8 with scales on dispatch and bf16 on combine.  In low-latency mode every one of
    the top-k selections of a token travels; otherwise a token travels once to each rank that holds
    one of them, ``ranks (1 - (1 - 1/ranks)^topk)`` in the mean of even routing.  The time is that
    of transfer and notification together.  Direction, mode and number of multiprocessors are part
    of the fabric.
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
        parts.append(
            collective_rows(
                frame,
                device=texts(frame, "device"),
                fabric=joined(named, ["system", "_way", "mode", "_sms", "sglang_version"]),
                collective=pd.Series(Collective.ALL_TO_ALL.value, index=frame.index),
                num_ranks=ranks,
                num_nodes=num_nodes(frame, ranks),
                nbytes=elements * nbytes,
                time_s=numbers(frame, f"{way}_avg_t_us").fillna(split) * MICROSECOND_S,
                flag=flags(frame),
            )
        )
    return pd.concat(parts, ignore_index=True)


def read_vidur(frame: pd.DataFrame) -> pd.DataFrame:
    """Profiles of vidur, their median time; a topology is a fabric."""
    ranks = numbers(frame, "ranks")
    return collective_rows(
        frame,
        device=texts(frame, "gpu"),
        fabric=texts(frame, "topology"),
        collective=_collectives(frame),
        num_ranks=ranks,
        num_nodes=num_nodes(frame, ranks),
        nbytes=numbers(frame, "bytes"),
        time_s=numbers(frame, "time_us_median") * MICROSECOND_S,
        flag=flags(frame),
    )


def read_vtrain(frame: pd.DataFrame) -> pd.DataFrame:
    """All-reduce tables of vTrain inside a node, their out-of-place time."""
    ranks = numbers(frame, "ranks")
    return collective_rows(
        frame,
        device=texts(frame, "gpu"),
        fabric=texts(frame, "gpu") + " node",
        collective=_collectives(frame),
        num_ranks=ranks,
        num_nodes=num_nodes(frame, ranks),
        nbytes=numbers(frame, "bytes"),
        time_s=numbers(frame, "time_us_oop").fillna(numbers(frame, "time_us_ip")) * MICROSECOND_S,
        flag=flags(frame),
    )


def read_aceso(frame: pd.DataFrame) -> pd.DataFrame:
    """Profiles of Aceso and of those who used its profiler (each repository is a fabric).

    Sizes were cut to whole MiB, so that small ones are flagged; point-to-point rows are exact, but
    published as a bandwidth.
    """
    collective = _collectives(frame)
    is_send = collective == Collective.SEND.value
    ranks, nbytes = numbers(frame, "ranks"), numbers(frame, "total_bytes_approx")
    by_rate = nbytes / (numbers(frame, "bandwidth_gb_s") * _GIGABYTE)
    flag = flags(frame)
    out = collective_rows(
        frame,
        device=texts(frame, "gpu"),
        fabric=joined(frame, ["gpu", "repo"]),
        collective=collective,
        num_ranks=ranks,
        num_nodes=num_nodes(frame, ranks),
        nbytes=nbytes,
        time_s=(numbers(frame, "time_us") * MICROSECOND_S).fillna(by_rate),
        flag=flag,
    )
    is_cut = (numbers(frame, "size_mib_truncated") < _TRUNCATED_BELOW_MIB) & ~is_send
    add_flag(out, is_cut, f"size truncated to MiB, below {_TRUNCATED_BELOW_MIB}")
    add_flag(out, out["time_s"] >= _FAILED_S, "failed")
    return out


FAMILIES = (
    TableFamily(
        name="estimate-train-time collectives",
        columns=frozenset({"op", "ranks", "bytes_per_rank", "time_us", "cluster"}),
        read=read_ett,
    ),
    TableFamily(
        name="nccl-tests",
        columns=frozenset({"op", "ranks", "bytes_nccltests_size", "time_us_oop", "cluster"}),
        read=read_nccl_tests,
    ),
    TableFamily(
        name="aiconfigurator collectives",
        columns=frozenset({"op", "ranks", "bytes_nccltests_size", "time_us", "system"}),
        read=read_aiconfigurator,
    ),
    TableFamily(
        name="DeepEP",
        columns=frozenset({"ranks", "tokens_per_rank", "hidden_size", "num_topk", "mode"}),
        read=read_deepep,
    ),
    TableFamily(
        name="vidur collectives",
        columns=frozenset({"op", "ranks", "bytes", "time_us_median", "topology"}),
        read=read_vidur,
    ),
    TableFamily(
        name="vTrain all-reduce",
        columns=frozenset({"op", "ranks", "bytes", "time_us_oop", "gpu"}),
        read=read_vtrain,
    ),
    TableFamily(
        name="Aceso collectives",
        columns=frozenset({"op", "ranks", "size_mib_truncated", "total_bytes_approx", "time_us"}),
        read=read_aceso,
    ),
)


def _collectives(frame: pd.DataFrame) -> pd.Series:
    """Canonical names; an operation that is none of them is ``other``, which nobody fits."""
    values = {name: collective.value for name, collective in _COLLECTIVES.items()}
    return texts(frame, "op").str.lower().map(values).fillna(Collective.OTHER.value)
