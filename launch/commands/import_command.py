"""``forerun import``: measurements of other tools into tables in our own format."""

from __future__ import annotations

import argparse
import gzip
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from ...calib.errors import ConfigError, ForerunError, RecordError
from ...calib.importers import TraceShares, kineto_tables, nccl_tests_collectives
from ...calib.plain_json import parse_json
from ..known.table_files import check_ending, import_table, write_frame, written_json
from .outcome import ExitCode, print_json, tell

# Parsed, a trace takes some ten times its size; a gigabyte is hundreds of steps.
MAX_NBYTES = 1 << 30
UNKNOWN_FABRIC = "unknown"
_UNEXPECTED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


@dataclass(slots=True, kw_only=True)
class _Found:
    """What the files held so far."""

    operators: list[pd.DataFrame] = field(default_factory=list)
    collectives: list[pd.DataFrame] = field(default_factory=list)
    kernels: list[pd.DataFrame] = field(default_factory=list)
    shares: list[TraceShares] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def import_files(args: argparse.Namespace) -> int:
    """Write the tables; operators and collectives of one call go into two files.

    What is imported as ``steps`` goes into a directory, a file for each table.
    """
    if args.source == "steps":
        return _import_machine(args)
    for path in (args.out, args.kernels or args.out):
        check_ending(path)
    if args.ranks_per_node < 1:
        raise ConfigError(f"--ranks-per-node {args.ranks_per_node} is below 1; give a whole number")
    found = _Found()
    for path in args.files:
        _read(path, args, found)
    tell(*found.problems)
    written = []
    for rows, out in _outputs(found, args):
        write_frame(rows, out)
        written.append({"file": str(out), "rows": len(rows)})
    if not written:
        raise RecordError(f"nothing to import in {', '.join(map(str, args.files))}")
    if args.json:
        print_json({"written": written, "traces": [asdict(one) for one in found.shares]})
    else:
        for one in written:
            print(f"{one['file']}: {one['rows']} rows")
    return ExitCode.ANSWER


def _import_machine(args: argparse.Namespace) -> int:
    written = [import_table(path, args.out) for path in args.files]
    for one in written:
        tell(*(f"left out of {one.path.name}: {told}" for told in one.left_out))
    if args.json:
        print_json({"written": written_json(written)})
    else:
        for one in written:
            print(f"{one.path}: {one.num_rows} rows")
    return ExitCode.ANSWER


def _read(path: Path, args: argparse.Namespace, found: _Found) -> None:
    """One file; what its reader did not expect of a value is one line as well."""
    try:
        _READERS[args.source](path, args, found)
    except ForerunError:
        raise
    except _UNEXPECTED as err:
        why = f"{type(err).__name__}: {str(err)[:100]}"
        raise RecordError(
            f"{path} cannot be read as {args.source} ({why}); give a complete file of that kind"
        ) from err


def _kineto(path: Path, args: argparse.Namespace, found: _Found) -> None:
    tables = kineto_tables(
        _json(path),
        path.name,
        fabric=args.fabric or UNKNOWN_FABRIC,
        ranks_per_node=args.ranks_per_node,
    )
    if tables.shares is not None:
        found.shares.append(tables.shares)
        tell(tables.shares.text())
    if tables.refusal and args.kernels is None:
        raise RecordError(tables.refusal)
    found.problems += [tables.refusal] if tables.refusal else []
    found.operators.append(tables.operators)
    found.collectives.append(tables.collectives)
    found.kernels.append(tables.kernels)


def _nccl_tests(path: Path, args: argparse.Namespace, found: _Found) -> None:
    text = _bytes(path).decode(errors="replace")
    rows, problems = nccl_tests_collectives(text, path.name, fabric=args.fabric or UNKNOWN_FABRIC)
    found.collectives.append(rows)
    found.problems += problems


_READERS: dict[str, Callable[[Path, argparse.Namespace, _Found], None]] = {
    "kineto": _kineto,
    "nccl-tests": _nccl_tests,
}


def _outputs(found: _Found, args: argparse.Namespace) -> list[tuple[pd.DataFrame, Path]]:
    """Operators under the name given, or collectives where there are no operators; where there are
    both, collectives beside them.  Kernels under a name of their own, where one is given."""
    tables = [
        pd.concat(filled, ignore_index=True)
        for parts in (found.operators, found.collectives)
        if (filled := [part for part in parts if len(part)])
    ]
    stem, ending = args.out.name.split(".", 1)
    names = [args.out, args.out.with_name(f"{stem}-collectives.{ending}")]
    outputs = list(zip(tables, names, strict=False))
    if args.kernels is not None and found.kernels:
        outputs.append((pd.concat(found.kernels, ignore_index=True), args.kernels))
    return outputs


def _json(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(_bytes(path))
    except ValueError as err:
        raise RecordError(f"{path} is not JSON ({err}); give a complete trace") from err
    if not isinstance(value, dict):
        raise RecordError(f"{path} holds no JSON object; give a Chrome trace")
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
