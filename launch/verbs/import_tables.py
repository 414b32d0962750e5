"""``forerun import``: convert measurements of other tools into tables in our format."""

from __future__ import annotations

import argparse
import gzip
import zlib
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...calib.errors import ConfigError, ForerunError, RecordError
from ...calib.plain_json import parse_json
from ...hooks.process.launch_identity import safe_launch_id
from ...leaves import has_leaf, leaf
from .arguments import ExitCode, declare, print_answer, print_notes

if TYPE_CHECKING:
    import pandas as pd

    from ...calib.importers.kineto_origins import TraceShares

_DESCRIPTION = (
    "kineto: traces of PyTorch's profiler recorded with shapes. nccl-tests: logs. "
    "nccl-inspector: JSON logs of NCCL's profiler plugin, one for each rank. steps: step times of "
    "layouts, operators or collectives in Forerun's format, into a directory that answers "
    "predict and plan. log: training logs of Megatron-LM and its forks, into a directory that "
    "status, report and diff read as that of a run. Columns: recipes/published/FORMAT.md."
)
_ARGUMENTS = """
source              format of the files
files FILE          files to read
--out FILE|DIR      a table; for steps and log a directory
--fabric NAME       name of the cluster
--ranks-per-node N  kineto: ranks per node (default 8)
--device NAME       nccl-inspector: name of the GPUs, which its logs lack; kineto: name of the
                    device that ran the operators, in place of the trace's; log: that trained
--kernels FILE      kineto: shares of all kernels by phase, operator and transfer, with or without
                    shapes
"""
_READERS = {
    "kineto": "...calib.importers.kineto:kineto_tables",
    "nccl-tests": "...calib.importers.nccl_tests:nccl_tests_collectives",
    "nccl-inspector": "...calib.importers.nccl_inspector:inspector_operations",
    "steps": "...calib.importers.canonical_steps:read_steps",
    "log": "...calib.importers.training_log:read_training_log",
}
"""Reader of each source."""
# A parsed trace takes about ten times its size; a gigabyte is hundreds of steps.
MAX_NBYTES = 1 << 30
UNKNOWN_FABRIC = "unknown"
_UNEXPECTED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of ``import``."""
    sub.description = _DESCRIPTION
    declare(
        sub,
        _ARGUMENTS,
        source={"choices": tuple(filter(_is_there, _READERS))},
        files={"nargs": "+"},
        out={"required": True},
        ranks_per_node={"type": int, "default": 8},
        fabric={"default": UNKNOWN_FABRIC},
        device={"default": ""},
    )


def _is_there(source: str) -> bool:
    return has_leaf(_READERS[source], __package__ or "")


class _Tables:
    """Tables read from the files so far."""

    def __init__(self) -> None:
        self.operators: list[pd.DataFrame] = []
        self.collectives: list[pd.DataFrame] = []
        self.rank_operations: list[pd.DataFrame] = []
        self.kernels: list[pd.DataFrame] = []
        self.shares: list[TraceShares] = []
        self.problems: list[str] = []


def run(args: argparse.Namespace) -> int:
    """Write the tables; operators and collectives of one call go into separate files.

    With ``steps``, each table becomes a file in a directory.
    """
    from ..known.table_files import check_ending, write_frame

    if args.source == "nccl-inspector" and not args.device:
        raise ConfigError("logs of nccl-inspector name no device; give its name with --device NAME")
    if args.device and args.source in ("nccl-tests", "steps"):
        raise ConfigError(
            f"--device {args.device} is not for {args.source}, which names it; omit it"
        )
    if args.source == "steps":
        return _import_machine(args)
    if args.source == "log":
        return _import_log(args)
    for path in (args.out, args.kernels or args.out):
        check_ending(path)
    if args.ranks_per_node < 1:
        raise ConfigError(f"--ranks-per-node {args.ranks_per_node} is below 1; give a whole number")
    tables = _Tables()
    for path in args.files:
        _read(path, args, tables)
    _join_ranks(args, tables)
    print_notes(*tables.problems)
    written = []
    for rows, out in _outputs(tables, args):
        write_frame(rows, out)
        written.append({"file": str(out), "rows": len(rows)})
    if not written:
        raise RecordError(f"nothing to import in {', '.join(map(str, args.files))}")
    _print_written(args, {"written": written, "traces": [asdict(one) for one in tables.shares]})
    return ExitCode.ANSWER


def _import_machine(args: argparse.Namespace) -> int:
    from ..known.table_files import import_table

    rows = []
    for one in [import_table(path, args.out) for path in args.files]:
        skipped = list(one.skipped)
        print_notes(*(f"left out of {one.path.name}: {reason}" for reason in skipped))
        rows.append({"file": str(one.path), "rows": one.num_rows, "left_out": skipped})
    _print_written(args, {"written": rows})
    return ExitCode.ANSWER


def _import_log(args: argparse.Namespace) -> int:
    read_training_log = leaf(_READERS["log"], __package__ or "")
    from ..companion.replay import LoggedRun, replay_log

    names = " and ".join(path.name for path in args.files)
    log = read_training_log([_bytes(path).decode(errors="replace") for path in args.files], names)
    run = LoggedRun(
        log=log,
        run_id=safe_launch_id(f"log-{args.files[-1].name.split('.')[0]}"),
        end_unix_s=max(path.stat().st_mtime for path in args.files),
        device=args.device,
    )
    print_notes(*log.problems, *log.notes)
    with redirect_stdout(StringIO()):  # lines of a live run's log; status and report have them
        replay_log(run, args.out)
    written = [{"file": str(args.out), "run_id": run.run_id, "rows": len(log.lines)}]
    _print_written(args, {"written": written})
    return ExitCode.ANSWER


def _print_written(args: argparse.Namespace, answer: dict[str, Any]) -> None:
    print_answer(args, answer, (f"{one['file']}: {one['rows']} rows" for one in answer["written"]))


def _read(path: Path, args: argparse.Namespace, tables: _Tables) -> None:
    """Read one file; unexpected values are reported as ``RecordError`` in one line."""
    reader = leaf(_READERS[args.source], __package__ or "")
    try:
        if args.source == "kineto":
            _read_kineto(reader, path, args, tables)
            return
        text = _bytes(path).decode(errors="replace")
        if args.source == "nccl-tests":
            rows, problems = reader(text, path.name, fabric=args.fabric)
            tables.collectives.append(rows)
        else:
            rows, problems = reader(text, path.name)
            tables.rank_operations.append(rows.assign(device=args.device, fabric=args.fabric))
        tables.problems += problems
    except ForerunError:
        raise
    except _UNEXPECTED as err:
        why = f"{type(err).__name__}: {str(err)[:100]}"
        raise RecordError(
            f"{path} cannot be read as {args.source} ({why}); give a complete file of that kind"
        ) from err


def _read_kineto(reader: Any, path: Path, args: argparse.Namespace, tables: _Tables) -> None:
    one = reader(
        *(_json(path), path.name),
        fabric=args.fabric,
        ranks_per_node=args.ranks_per_node,
        device=args.device,
    )
    if one.shares is not None:
        tables.shares.append(one.shares)
        print_notes(one.shares.text())
    if one.refusal and args.kernels is None:
        raise RecordError(one.refusal)
    flagged = one.flag and f"{path.name}: {one.flag}; rows with a flag stay unused"
    tables.problems += filter(None, (one.refusal, flagged))
    tables.operators.append(one.operators)
    tables.rank_operations.append(one.collectives)
    tables.kernels.append(one.kernels)


def _join_ranks(args: argparse.Namespace, tables: _Tables) -> None:
    """Make one table of the operations that are in the files of several ranks."""
    from ...calib.importers.rank_operations import joined_ranks

    if filled := [rows for rows in tables.rank_operations if len(rows)]:
        rows, notes = joined_ranks(filled, "traces" if args.source == "kineto" else "logs")
        tables.collectives.append(rows)
        tables.problems += notes


def _outputs(tables: _Tables, args: argparse.Namespace) -> Iterator[tuple[pd.DataFrame, Path]]:
    """Yield tables and paths: operators under the given name, collectives next to them, or under
    that name if there are no operators; kernels under their own name, if given."""
    import pandas as pd

    stem, ending = args.out.name.split(".", 1)
    names = iter((args.out, args.out.with_name(f"{stem}-collectives.{ending}")))
    for parts in (tables.operators, tables.collectives):
        if filled := [part for part in parts if len(part)]:
            yield pd.concat(filled, ignore_index=True), next(names)
    if args.kernels is not None and tables.kernels:
        yield pd.concat(tables.kernels, ignore_index=True), args.kernels


def _json(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(_bytes(path))
    except ValueError as err:
        raise RecordError(f"{path} is not JSON ({err}); give a complete trace") from err
    if isinstance(value, list):  # a Chrome trace may be its events alone
        return {"traceEvents": value}
    if not isinstance(value, dict):
        raise RecordError(f"{path} holds one {type(value).__name__}; give a Chrome trace")
    return value


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_packed else path.open("rb") as file:
            data = file.read(MAX_NBYTES + 1)
    except FileNotFoundError as err:
        raise ConfigError(f"{path} does not exist; give the path of a file") from err
    except (OSError, EOFError, zlib.error) as err:
        raise RecordError(f"{path} cannot be read ({err}); give a complete file") from err
    if len(data) > MAX_NBYTES:
        raise RecordError(f"{path} is above {MAX_NBYTES >> 20} MiB unpacked; trace fewer steps")
    return data
