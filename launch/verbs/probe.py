"""``forerun probe``: measure a new machine without training, alone or under torchrun.

It prints operator times, and bandwidths as defined by nccl-tests.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ...calib.errors import ConfigError
from ...calib.records.files import replace_file
from ...calib.units import format_bytes, format_time
from ...calib.workload.collectives import Collective
from ...calib.workload.config import Batch, Precision, RunConfig
from ...calib.workload.model_shape import ModelShape
from ...calib.workload.operators import Operator
from ...calib.workload.parallelism import Parallelism
from ...hooks.process.node_topology import NodeTopology
from ...hooks.process.settings import RankInfo
from ..known.node_links import detect_links
from .arguments import ExitCode, declare, print_json

if TYPE_CHECKING:
    import torch

    from ...calib.records.record_kinds import Record

_DESCRIPTION = (
    "Products, memory and the operators of a layout; under torchrun collectives as well: torchrun "
    "--nproc-per-node N -m forerun probe --out DIR. The layout is that of --config or of the "
    "command after --, else a GPT that suits the device."
)
_ARGUMENTS = """
--out DIR          directory for the records
--config FILE      as for predict
--seconds SECONDS  time for all probes, in seconds (default 60)
--operators        these alone
--collectives      these alone
"""
_GIGA, _TERA = 1e9, 1e12
_OPERATOR = ("operator", "phase", "shape", "time", "TFLOP/s", "GB/s fitted")
_TRANSFER = ("collective", "ranks", "payload", "time", "algbw GB/s", "busbw GB/s")


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of ``probe``."""
    sub.description = _DESCRIPTION
    declare(sub, _ARGUMENTS, out={"required": True}, seconds={"default": 60.0})


def run(args: argparse.Namespace) -> int:
    """Measure, write this rank's records, and print the results on rank 0."""
    from ..options.flags import rank_info

    if not 0 < args.seconds < float("inf"):
        raise ConfigError(f"--seconds {args.seconds} is not a time; give a number above 0")
    rank = rank_info({"RANK": "0", **os.environ})
    device, name = _device(rank)
    config = _config(args, rank, name)
    is_joined = rank.world_size > 1
    if is_joined:
        import torch.distributed as dist

        dist.init_process_group(backend="nccl" if device.type == "cuda" else "gloo")
    records = list(_measure(args, config, device, is_joined=is_joined))
    _write(args.out, rank, name, config, records)
    if rank.rank == 0:
        _show(args, records, device, name)
    if is_joined:
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()
    return ExitCode.ANSWER


def _device(rank: RankInfo) -> tuple[torch.device, str]:
    import torch

    if os.environ.get("FORERUN_DEVICE") == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu"), "cpu"
    device = torch.device("cuda", rank.local_rank)
    torch.cuda.set_device(device)
    return device, torch.cuda.get_device_name(device)


def _config(args: argparse.Namespace, rank: RankInfo, device: str) -> RunConfig:
    """Return the requested layout, or a GPT whose size suits the device."""
    from ..options.config_files import described_run

    usual = _usual(rank, device)
    num_ranks = usual.parallelism.num_ranks
    described = described_run(args.config, args.command, usual, usual_ranks=num_ranks)
    config = usual if described is None else described.config
    per_node = config.parallelism.ranks_per_node or rank.local_world_size
    parallelism = replace(config.parallelism, ranks_per_node=per_node)
    return replace(config, device=device, parallelism=parallelism)


def _usual(rank: RankInfo, device: str) -> RunConfig:
    is_cpu = device == "cpu"
    hidden, layers, sequence = (256, 4, 256) if is_cpu else (2048, 24, 2048)
    heads = hidden // (32 if is_cpu else 128)
    return RunConfig(
        model=ModelShape(
            num_layers=layers,
            hidden_size=hidden,
            ffn_hidden_size=4 * hidden,
            num_attention_heads=heads,
            num_query_groups=heads,
            kv_channels=hidden // heads,
            seq_length=sequence,
            vocab_size=1024 if is_cpu else 51200,
        ),
        parallelism=Parallelism(dp=rank.world_size, ranks_per_node=rank.local_world_size),
        batch=Batch(micro_batch_size=1, global_batch_size=8 * rank.world_size),
        precision=Precision.FP32 if is_cpu else Precision.BF16,
        device=device,
    )


def _measure(
    args: argparse.Namespace, config: RunConfig, device: torch.device, *, is_joined: bool
) -> Iterator[Record]:
    from ...hooks.probing.probe_sweep import Sweep
    from ...hooks.session.devices import stopwatch_on

    has_operators = args.operators or not args.collectives
    has_transfers = is_joined and (args.collectives or not args.operators)
    share_s = args.seconds / max(1, has_operators + has_transfers)
    sweep = Sweep(config, device, stopwatch_on(device), seconds=share_s)
    if has_operators:
        yield from sweep.operators()
    if has_transfers:
        yield from sweep.transfers()


def _write(
    directory: Path, rank: RankInfo, device: str, config: RunConfig, records: Iterable[Record]
) -> None:
    """Write one file per rank, as hooks do."""
    from ...calib.records.cluster import Cluster
    from ...calib.records.record_kinds import SCHEMA, Header, RunRecord, WindowRecord, to_dict

    cluster = Cluster.from_json(NodeTopology(rank, os.environ).cluster_json())
    if cluster.seen:
        cluster = cluster.with_links(detect_links())
    header = Header(
        schema=SCHEMA,
        run_id=rank.run_id,
        rank=rank.rank,
        world_size=rank.world_size,
        created_by="forerun probe",
        device=device,
        started_unix_s=time.time(),
        cluster=cluster.to_json() if cluster.seen else {},
    )
    end = WindowRecord(window=0, first_step=0, last_step=0, num_faults=0, num_dropped=0)
    lines = [header, RunRecord(config=config.to_json()), *records, end]
    path = directory / "records" / rank.run_id / f"rank-{rank.rank:05d}.jsonl"
    replace_file(path, "".join(json.dumps(to_dict(record)) + "\n" for record in lines))


def _show(
    args: argparse.Namespace, records: Sequence[Record], device: torch.device, name: str
) -> None:
    """Print the measurements of this rank."""
    from ...hooks.probing.probe_sweep import copy_bytes_per_s

    operators, transfers = list(_operator_rows(records)), list(_transfer_rows(records))
    copies = copy_bytes_per_s(device)
    if args.json:
        value = {"device": name, "copy_bytes_per_s": copies, "operators": operators}
        print_json({**value, "collectives": transfers, "directory": str(args.out)})
        return
    from ..views.table import ReportTable, console, show_table

    out = console()
    peak = max((row["flop_per_s"] for row in operators), default=0.0)
    rates = f"products {peak / _TERA:.3g} TFLOP/s · copies {copies / _GIGA:.4g} GB/s"
    counts = f"{len(operators)} operators · {len(transfers)} transfers"
    print(f"[forerun] {name} · {rates} · {counts}")
    cells = tuple(map(_operator_cells, operators)), tuple(map(_transfer_cells, transfers))
    titles = ("Operators", _OPERATOR), ("Collectives", _TRANSFER)
    for (title, columns), rows in zip(titles, cells, strict=True):
        if rows:
            key = f"probed_{title.lower()}"
            show_table(ReportTable(key=key, title=title, columns=columns, rows=rows), out)
    print(f"next: forerun plan {args.out}, or forerun predict {args.out} --config FILE")


def _operator_rows(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    from ...calib.fit.laws import work
    from ...calib.records.record_kinds import OperatorRecord

    times: defaultdict[Operator, list[int]] = defaultdict(list)
    for record in records:
        if isinstance(record, OperatorRecord):
            names = ("kind", "phase", "shape", "element_nbytes")
            operator = Operator(**{name: getattr(record, name) for name in names})
            times[operator].append(record.duration_ns)
    for operator, spent in times.items():
        time_s = max(median(spent), 1) * 1e-9
        done = work(operator)
        yield {
            "kind": operator.kind.value,
            "phase": operator.phase.value,
            "shape": list(operator.shape),
            "time_s": time_s,
            "flop_per_s": done.flop / time_s,
            "bytes_per_s": done.nbytes / time_s,
        }


def _transfer_rows(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yield each transfer once, whatever its roles; bandwidths as defined by nccl-tests."""
    from ...calib.network.groups import bus_factor
    from ...calib.records.record_kinds import CollectiveRecord

    times: defaultdict[tuple[Collective, int, int], list[int]] = defaultdict(list)
    seen: set[tuple[str, int]] = set()
    for record in records:
        if isinstance(record, CollectiveRecord):
            event = (record.group.rpartition("/")[0], record.sequence)
            kind = record.collective
            kind = Collective.SEND if kind is Collective.RECV else kind
            if event not in seen:
                seen.add(event)
                size = 2 if kind is Collective.SEND else len(record.ranks)
                times[kind, size, record.nbytes].append(record.duration_ns)
    for (kind, size, nbytes), spent in times.items():
        time_s = max(median(spent), 1) * 1e-9
        yield {
            "collective": kind.value,
            "num_ranks": size,
            "nbytes": nbytes,
            "time_s": time_s,
            "algorithm_bytes_per_s": nbytes / time_s,
            "bus_bytes_per_s": nbytes / time_s * bus_factor(kind, size),
        }


def _operator_cells(row: dict[str, Any]) -> tuple[str, ...]:
    rates = f"{row['flop_per_s'] / _TERA:.3g}", f"{row['bytes_per_s'] / _GIGA:.4g}"
    shape = "x".join(map(str, row["shape"]))
    return (row["kind"], row["phase"], shape, format_time(row["time_s"]), *rates)


def _transfer_cells(row: dict[str, Any]) -> tuple[str, ...]:
    rates = (f"{row[key] / _GIGA:.4g}" for key in ("algorithm_bytes_per_s", "bus_bytes_per_s"))
    sizes = str(row["num_ranks"]), format_bytes(row["nbytes"]), format_time(row["time_s"])
    return (row["collective"], *sizes, *rates)
