"""Options of the verbs that need no calibrated run: what else measures, or was measured."""

from __future__ import annotations

import argparse
from pathlib import Path

from .cluster_files import add_cluster
from .lint_options import add_lint_options


def add_validate(verbs: argparse._SubParsersAction) -> None:
    """The options of ``forerun validate``."""
    add = verbs.add_parser(
        "validate",
        help="how right the models are on tables of measurements",
        description=(
            "Fits on one part of each table, scores on the rest. Protocols of operators: random, "
            "leave_tp; of collectives: random, leave_span; of steps: leave_one_out. At most 2,000 "
            "samples of an operator train and 2,000 are scored for each seed, drawn by the seed. "
            "steps: whole steps of layouts. design: the layouts that would be most worth "
            "measuring. Columns: recipes/published/FORMAT.md."
        ),
        allow_abbrev=False,
    ).add_argument
    what = ("operators", "collectives", "steps", "design")
    add("what", choices=what, help="what to validate; design: which layouts to measure")
    add("files", type=Path, nargs="+", metavar="FILE", help=".csv[.gz], .parquet")
    add("--protocol", action="append", metavar="NAME", help="only this protocol (may be repeated)")
    add(
        "--seeds",
        type=int,
        default=5,
        metavar="N",
        help=("number of random draws to pool (default 5)"),
    )
    add(
        "--calibrate-on",
        type=int,
        metavar="K",
        help="steps: number of rows that calibrate; the rest is scored",
    )
    add(
        "--draws", type=int, default=20, metavar="N", help="steps: draws of these rows (default 20)"
    )
    add(
        "--operators",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="steps: tables of operators and collectives of the same devices",
    )
    add(
        "--rows",
        type=int,
        default=10,
        metavar="K",
        help=("design: number of layouts to name (default 10)"),
    )
    add_cluster(add, "collectives, steps: ")


def add_import(verbs: argparse._SubParsersAction) -> None:
    """The options of ``forerun import``."""
    add = verbs.add_parser(
        "import",
        help="turn measurements of other tools into tables in Forerun's format",
        description=(
            "kineto: traces of PyTorch's profiler recorded with shapes. nccl-tests: logs. steps: "
            "step times of layouts, operators or collectives in Forerun's format, into a directory "
            "that answers predict and plan. Columns: recipes/published/FORMAT.md."
        ),
        allow_abbrev=False,
    ).add_argument
    add("source", choices=("kineto", "nccl-tests", "steps"), help="format of the files")
    add("files", type=Path, nargs="+", metavar="FILE", help="files to read")
    place = "FILE|DIR"
    add("--out", type=Path, required=True, metavar=place, help="a table; for steps a directory")
    add("--fabric", metavar="NAME", help="name of the cluster")
    add(
        "--ranks-per-node",
        type=int,
        default=8,
        metavar="N",
        help=("kineto: ranks per node (default 8)"),
    )
    add(
        "--kernels",
        type=Path,
        metavar="FILE",
        help=(
            "kineto: shares of all kernels by phase, operator and transfer, with or without shapes"
        ),
    )


def add_probe(verbs: argparse._SubParsersAction) -> None:
    """The options of ``forerun probe``."""
    add = verbs.add_parser(
        "probe",
        help="measure a new machine without training, alone or under torchrun",
        description=(
            "Products, memory and the operators of a layout; under torchrun collectives as well: "
            "torchrun --nproc-per-node N -m forerun probe --out DIR. The layout is that of "
            "--config or of the command after --, else a GPT that suits the device."
        ),
        allow_abbrev=False,
    ).add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="directory for the records")
    add("--config", type=Path, metavar="FILE", help="as for predict")
    add("--seconds", type=float, default=60.0, help="time for all probes, in seconds (default 60)")
    add("--operators", action="store_true", help="these alone")
    add("--collectives", action="store_true", help="these alone")


def add_doctor(verbs: argparse._SubParsersAction) -> None:
    """The options of ``forerun doctor``."""
    what = "what is installed here and would be attached; with a launch: what it wastes"
    add_lint_options(verbs.add_parser("doctor", help=what, allow_abbrev=False))
