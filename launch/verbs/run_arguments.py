"""Selection of the run for a verb: its arguments, opening it, printing its answers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...calib.errors import ConfigError
from ...calib.memory.devices import known_device
from ...calib.workload.argument_values import whole
from .arguments import CLUSTER, DIRECTORY, RUN_ID, declare, print_json, print_notes

if TYPE_CHECKING:
    from ..opened.run import Run

NO_DIRECTORY = "-"
"""Placeholder for DIR: published measurements replace a run."""
_WITHOUT_DIRECTORY = ("predict", "plan", "explain")
_NO_RUN = "--device NAME with --config FILE or -- COMMAND"
_NEED_NOTHING = ("-h", "--help", "--json-schema")
_REPEATED = {"action": "append"}
_EVIDENCE = """
--config FILE  another run over this calibration: Megatron's arguments as YAML or JSON, its log, a
               Hugging Face config.json; or give its whole command after --
--anyway  answer although an option of that run is not modelled; its steps or memory may be off
          by a factor of 2 more
--assume-no-effect NAME  an option of that run's own script changes neither time nor memory (may be
                         repeated)
--also DIR  another directory whose measured steps count too (may be repeated)
--machine NAME  which machine, if steps of several were imported
--cluster FILE  """
_ELSEWHERE = """
--like DIR  a run on another machine, or on another device: its operators are carried over and
            corrected by the samples or probes of this directory
--device NAME  a device without measurements, such as H100, or its driver's name: operators are
               carried over by data sheets; plan takes several, separated by commas
"""


def add_run(sub: argparse.ArgumentParser) -> None:
    """Add the arguments that select a directory and run."""
    declare(sub, f"{DIRECTORY.rstrip()}; before any run, {_NO_RUN} takes its place\n{RUN_ID}")


def add_evidence(sub: argparse.ArgumentParser) -> None:
    """Add the arguments for other runs and further evidence than a directory's newest run."""
    declare(sub, _EVIDENCE + CLUSTER, also=_REPEATED, assume_no_effect=_REPEATED)
    declare(sub.add_mutually_exclusive_group(), _ELSEWHERE)


def open_run(args: argparse.Namespace) -> Run:
    """Return the run of a directory with the evidence from the options and a verb's search effort;
    without a directory, an unmeasured run on a device."""
    from ..opened.run import load
    from ..views.progress import search_effort

    if str(args.directory) == NO_DIRECTORY:
        from ..opened.run import unmeasured

        if args.device is None:
            raise ConfigError("--device NAME is missing; give one, such as H100, or DIR first")
        first, *others = args.device.split(",")
        if others and args.verb != "plan":
            devices = ", ".join(known_device(name).driver_name for name in (first, *others))
            raise ConfigError(f"{args.verb} takes one --device, not {devices}; plan takes several")
        return unmeasured(
            first,
            config=args.config,
            command=args.command,
            options=_run_words(args),
            num_ranks=_num_ranks(args),
            cluster=args.cluster,
            searching=search_effort,
        )
    names = ("run_id", "machine", "like", "device", "cluster")  # not all verbs take all of them
    selection: dict[str, Any] = {name: getattr(args, name, None) for name in names}
    also = getattr(args, "also", None) or ()
    return load(args.directory, **selection, also=also, searching=search_effort)


def other_run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the description of another run, by the parameter names of ``Run``'s methods."""
    names = ("config", "command", "anyway")
    description = {name: getattr(args, name) for name in names}
    if str(args.directory) == NO_DIRECTORY:  # the run of ``open_run`` is the one described
        description |= {"config": None, "command": ()}
    return {**description, "assume_no_effect": args.assume_no_effect or ()}


def show_answer(args: argparse.Namespace, answer: Any) -> None:
    """Print an answer and its notes, and write the trace if requested."""
    print_notes(*answer.notes)
    if args.json:
        print_json(answer.to_json())
    else:
        from ..views.table import print_parts  # slow to import

        print_parts(answer.parts())
    if getattr(args, "timeline", None) is not None:
        answer.write_timeline(args.timeline)
        print_notes(f"trace for ui.perfetto.dev written to {args.timeline}")


def with_directory_placeholder(words: Sequence[str], command: Sequence[str] = ()) -> list[str]:
    """Return a verb's words, with ``NO_DIRECTORY`` inserted if a device, a file or a ``command`` is
    given, but no directory.

    >>> with_directory_placeholder(["predict", "--device", "H100"])
    ['predict', '-', '--device', 'H100']
    >>> with_directory_placeholder(["predict", "DIR", "--device", "H100"])
    ['predict', 'DIR', '--device', 'H100']
    """
    names = {word.partition("=")[0] for word in words}
    is_described = bool({"--device", "--config"} & names or command)
    is_possible = words and words[0] in _WITHOUT_DIRECTORY and is_described
    if not is_possible or {*_NEED_NOTHING} & names or not "".join(words[1:2]).startswith("-"):
        return list(words)
    places = (word for before, word in pairwise(words) if before != "--config")
    if any(Path(word).is_dir() for word in places):
        return list(words)
    return [words[0], NO_DIRECTORY, *words[1:]]


def _num_ranks(args: argparse.Namespace) -> int:
    """Return the first number of ``--gpus``; 0 if not given."""
    words = (word.partition("--gpus=")[2] for word in args.options)
    text = str(getattr(args, "gpus", None) or next(filter(None, words), ""))
    first = text.partition(",")[0].partition("..")[0]
    return whole("gpus", first) if first else 0


def _run_words(args: argparse.Namespace) -> list[str]:
    """Return the Megatron options that complete a ``config.json``."""
    words = [word for word in args.options if not word.startswith("--gpus=")]
    from ..options.plan_options import read_batch  # used for few questions only

    rule = read_batch(getattr(args, "global_batch_size", None) or "")
    each = rule.samples_per_rank or int(rule.follows_ranks)
    sizes = {
        "--global-batch-size": rule.samples or each * max(1, _num_ranks(args)),
        "--seq-length": getattr(args, "seq_length", None),
    }
    return [
        *words,
        *(word for option, size in sizes.items() if size for word in (option, str(size))),
    ]
