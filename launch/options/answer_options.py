"""Options of the verbs that ask of a calibrated run: report, predict, plan, explain."""

from __future__ import annotations

import argparse
from pathlib import Path

from .cluster_files import add_cluster
from .explain_options import add_explain_options, add_timeline
from .plan_options import (
    SCHEMA_FILE,
    add_layout_options,
    add_plan_options,
    add_tokens,
    describe_layout_names,
)
from .schema_option import add_file_schema_option, add_schema_option
from .show_options import add_show


def add_report(verbs: argparse._SubParsersAction) -> None:
    """The options of ``forerun report``."""
    sub = _add_run(verbs, "report", "when a calibrated run ends, and where its step goes")
    add_file_schema_option(sub)
    sub.add_argument("--full", action="store_true", help="every table, and every row of each")


def add_predict(verbs: argparse._SubParsersAction) -> None:
    """The options of ``forerun predict``; those of Megatron pass through by their own names."""
    sub = _add_run(
        verbs, "predict", "step time of another layout: --tp 4 --mbs 2, or Megatron's own options"
    )
    sub.set_defaults(takes_options=True)
    _add_evidence(sub)
    add_schema_option(sub, SCHEMA_FILE)
    add_layout_options(sub)
    sub.add_argument(
        "--fail-over",
        type=float,
        metavar="SECONDS",
        help="exit 1 if the step is slower than this",
    )
    add_tokens(sub)
    sub.add_argument(
        "--sbatch",
        type=Path,
        metavar="FILE",
        help="write a script for sbatch whose --time holds the run with 95 %%",
    )
    add_timeline(sub)


def add_plan(verbs: argparse._SubParsersAction) -> None:
    """The options of ``forerun plan``."""
    sub = _add_run(
        verbs, "plan", ("the best layouts on a number of GPUs, of the same kind or another")
    )
    _add_evidence(sub)
    add_schema_option(sub, SCHEMA_FILE)
    add_plan_options(sub)
    add_show(sub)
    describe_layout_names(sub)


def add_explain(verbs: argparse._SubParsersAction) -> None:
    """The options of ``forerun explain``."""
    sub = verbs.add_parser(
        "explain",
        help="where the step time of a layout goes, and why it is faster than another",
        description="A layout is named as a plan prints it (TP4 PP2 DP2 mbs2), in short names over "
        "the running layout (tp4 pp2), by its row in the plan (3), or as running.",
        allow_abbrev=False,
    )
    add_explain_options(sub)
    _add_evidence(sub)


def add_normal(verbs: argparse._SubParsersAction) -> None:
    """The options of ``forerun normal``."""
    sub = _add_run(verbs, "normal", "whether a run is as fast as published ones, and what differs")
    sub.set_defaults(also=None, like=None, device=None, cluster=None)
    sub.add_argument("--machine", metavar="NAME", help="which machine, if several were imported")
    add_schema_option(sub, SCHEMA_FILE.with_name("normal.schema.json"))


def _add_run(verbs: argparse._SubParsersAction, verb: str, text: str) -> argparse.ArgumentParser:
    """A verb that is asked of a run of a directory."""
    sub = verbs.add_parser(verb, help=text, allow_abbrev=False)
    sub.add_argument(
        "directory", type=Path, metavar="DIR", help="the directory that --calibrate-dir named"
    )
    sub.add_argument("--run-id", help="which run, if the directory holds several")
    return sub


def _add_evidence(sub: argparse.ArgumentParser) -> None:
    """What else is asked of, and what else counts, than the newest run of a directory."""
    add = sub.add_argument
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help=(
            "another run over this calibration: Megatron's arguments as YAML or JSON, a Hugging "
            "Face config.json, a checkpoint; or give its whole command after --"
        ),
    )
    add(
        "--anyway",
        action="store_true",
        help=(
            "answer although an option of that run is not modelled; its steps may be off by a "
            "factor of 2 more"
        ),
    )
    add(
        "--assume-no-effect",
        action="append",
        metavar="NAME",
        help=(
            "an option of that run's own script changes neither time nor memory (may be repeated)"
        ),
    )
    add(
        "--also",
        type=Path,
        action="append",
        metavar="DIR",
        help="another directory whose measured steps count too (may be repeated)",
    )
    add("--machine", metavar="NAME", help="which machine, if steps of several were imported")
    add_cluster(add)
    over = sub.add_mutually_exclusive_group().add_argument
    over(
        "--like",
        type=Path,
        metavar="DIR",
        help=(
            "a run on another machine, or on another device: its operators are carried over and "
            "corrected by the samples or probes of this directory"
        ),
    )
    over(
        "--device",
        metavar="NAME",
        help=(
            "a device without measurements, such as H100, or its driver's name: operators are "
            "carried over by data sheets; plan takes several, separated by commas"
        ),
    )
