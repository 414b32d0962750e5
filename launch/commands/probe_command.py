"""``forerun probe``: a new machine measured without training, alone or under torchrun.

It prints operators, and bandwidths as nccl-tests counts them.
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
from ...calib.fit.laws import work
from ...calib.network.groups import bus_factor
from ...calib.records import (
    SCHEMA,
    CollectiveRecord,
    Header,
    OperatorRecord,
    Record,
    RunRecord,
    WindowRecord,
    replace_file,
    to_dict,
)
from ...calib.units import format_bytes, format_time
from ...calib.workload import (
    Batch,
    Collective,
    ModelShape,
    Operator,
    Parallelism,
    Precision,
    RunConfig,
)
from ...hooks.process import RankInfo, Sight
from ..options.config_files import described_run
from ..options.flags import rank_info
from ..report.table import ReportTable, console, show_table
from .outcome import ExitCode, print_json

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from ...hooks.sensors import Stopwatch

_GIGA, _TERA = 1e9, 1e12


def probe(args: argparse.Namespace) -> int:
    """Measure, write the records of this rank, and on rank 0 print what was found."""
    if not 0 < args.seconds < float("inf"):
        raise ConfigError(f"--seconds {args.seconds} is not a time; give a number above 0")
    environ = {"RANK": "0", **os.environ}
    rank = rank_info(environ)
    device, name = _device(rank)
    config = _config(args, rank, name)
    is_joined = rank.world_size > 1
    if is_joined:
        _join(device)
    records = list(_measure(args, config, device, is_joined=is_joined))
    _write(args.out, rank, name, config, records)
    if rank.rank == 0:
        from ...hooks.probing import copy_bytes_per_s

        _show(
            records,
            device=name,
            copy_bytes_per_s=copy_bytes_per_s(device),
            directory=args.out,
            is_json=args.json,
        )
    if is_joined:
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()
    return ExitCode.ANSWER


def _device(rank: RankInfo) -> tuple[torch.device, str]:
    import torch

    is_cpu = os.environ.get("FORERUN_DEVICE") == "cpu" or not torch.cuda.is_available()
    if is_cpu:
        return torch.device("cpu"), "cpu"
    device = torch.device("cuda", rank.local_rank)
    torch.cuda.set_device(device)
    return device, torch.cuda.get_device_name(device)


def _join(device: torch.device) -> None:
    import torch.distributed as dist

    dist.init_process_group(backend="nccl" if device.type == "cuda" else "gloo")


def _config(args: argparse.Namespace, rank: RankInfo, device: str) -> RunConfig:
    """The layout that is asked for, or a GPT of the size that suits the device."""
    default = _default(rank, device)
    told = described_run(
        args.config, args.command, default, usual_ranks=default.parallelism.num_ranks
    )
    found = default if told is None else told.config
    per_node = found.parallelism.ranks_per_node or rank.local_world_size
    parallelism = replace(found.parallelism, ranks_per_node=per_node)
    return replace(found, device=device, parallelism=parallelism)


def _default(rank: RankInfo, device: str) -> RunConfig:
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
    from ...hooks.probing import Sweep

    has_operators = args.operators or not args.collectives
    has_transfers = is_joined and (args.collectives or not args.operators)
    share_s = args.seconds / max(1, has_operators + has_transfers)
    sweep = Sweep(config, device, _stopwatch(device), seconds=share_s)
    if has_operators:
        yield from sweep.operators()
    if has_transfers:
        yield from sweep.transfers()


def _stopwatch(device: torch.device) -> Stopwatch:
    from ...hooks.sensors import DeviceStopwatch, HostStopwatch

    if device.type != "cuda":
        return HostStopwatch()
    import torch

    return DeviceStopwatch(lambda: torch.cuda.Event(enable_timing=True))


def _write(
    directory: Path, rank: RankInfo, device: str, config: RunConfig, records: Iterable[Record]
) -> None:
    """One file per rank, as hooks write them."""
    path = directory / "records" / rank.run_id / f"rank-{rank.rank:05d}.jsonl"
    header = Header(
        schema=SCHEMA,
        run_id=rank.run_id,
        rank=rank.rank,
        world_size=rank.world_size,
        created_by="forerun probe",
        device=device,
        started_unix_s=time.time(),
        cluster=Sight(rank, os.environ).told(),
    )
    end = WindowRecord(window=0, first_step=0, last_step=0, num_faults=0, num_dropped=0)
    whole = [header, RunRecord(config=config.to_json()), *records, end]
    replace_file(path, "".join(json.dumps(to_dict(record)) + "\n" for record in whole))


def _show(
    records: Sequence[Record],
    *,
    device: str,
    copy_bytes_per_s: float,
    directory: Path,
    is_json: bool,
) -> None:
    """Print what one rank has measured."""
    operators, transfers = _operator_rows(records), _transfer_rows(records)
    if is_json:
        value = {"device": device, "copy_bytes_per_s": copy_bytes_per_s}
        value |= {"operators": operators, "collectives": transfers, "directory": str(directory)}
        print_json(value)
        return
    out = console()
    peak = max((row["flop_per_s"] for row in operators), default=0.0)
    counts = f"{len(operators)} operators · {len(transfers)} transfers"
    rates = f"products {peak / _TERA:.3g} TFLOP/s · copies {copy_bytes_per_s / _GIGA:.4g} GB/s"
    _say(out, f"[forerun] {device} · {rates} · {counts}")
    for table in (_operator_table(operators), _transfer_table(transfers)):
        if table.rows:
            show_table(table, out)
    _say(out, f"next: forerun plan {directory}, or forerun predict {directory} --config FILE")


def _say(out: Console, text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def _operator_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    times: defaultdict[Operator, list[int]] = defaultdict(list)
    for record in records:
        if isinstance(record, OperatorRecord):
            operator = Operator(
                kind=record.kind,
                phase=record.phase,
                shape=record.shape,
                element_nbytes=record.element_nbytes,
            )
            times[operator].append(record.duration_ns)
    rows = []
    for operator, spent in times.items():
        time_s = max(median(spent), 1) * 1e-9
        done = work(operator)
        rows.append(
            {
                "kind": operator.kind.value,
                "phase": operator.phase.value,
                "shape": list(operator.shape),
                "time_s": time_s,
                "flop_per_s": done.flop / time_s,
                "bytes_per_s": done.nbytes / time_s,
            }
        )
    return rows


def _transfer_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Each transfer once, whatever roles it stands for; bandwidths as nccl-tests counts them."""
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
    rows = []
    for (kind, size, nbytes), spent in times.items():
        time_s = max(median(spent), 1) * 1e-9
        bandwidth = nbytes / time_s
        rows.append(
            {
                "collective": kind.value,
                "num_ranks": size,
                "nbytes": nbytes,
                "time_s": time_s,
                "algorithm_bytes_per_s": bandwidth,
                "bus_bytes_per_s": bandwidth * bus_factor(kind, size),
            }
        )
    return rows


def _operator_table(rows: list[dict[str, Any]]) -> ReportTable:
    cells = [
        (
            row["kind"],
            row["phase"],
            "x".join(str(size) for size in row["shape"]),
            format_time(row["time_s"]),
            f"{row['flop_per_s'] / _TERA:.3g}",
            f"{row['bytes_per_s'] / _GIGA:.4g}",
        )
        for row in rows
    ]
    return ReportTable(
        key="probed_operators",
        title="Operators",
        columns=("operator", "phase", "shape", "time", "TFLOP/s", "GB/s fitted"),
        rows=tuple(cells),
    )


def _transfer_table(rows: list[dict[str, Any]]) -> ReportTable:
    cells = [
        (
            row["collective"],
            str(row["num_ranks"]),
            format_bytes(row["nbytes"]),
            format_time(row["time_s"]),
            f"{row['algorithm_bytes_per_s'] / _GIGA:.4g}",
            f"{row['bus_bytes_per_s'] / _GIGA:.4g}",
        )
        for row in rows
    ]
    return ReportTable(
        key="probed_collectives",
        title="Collectives",
        columns=("collective", "ranks", "payload", "time", "algbw GB/s", "busbw GB/s"),
        rows=tuple(cells),
    )
