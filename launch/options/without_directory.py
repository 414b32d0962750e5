"""Verbs that answer without a directory: what is written in the place of one, and what is read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from ...calib.workload import whole

NO_DIRECTORY = "-"
"""In the place of DIR: published measurements answer in place of a run."""
_VERBS = ("predict", "plan")
_ASKED = ("-h", "--help", "--json-schema")
"""Options that need neither."""


def with_place(words: Sequence[str]) -> list[str]:
    """The words of a verb with ``NO_DIRECTORY`` where a device is named and no directory.

    >>> with_place(["predict", "--device", "H100"])
    ['predict', '-', '--device', 'H100']
    >>> with_place(["predict", "DIR", "--device", "H100"])
    ['predict', 'DIR', '--device', 'H100']
    """
    names = {word.partition("=")[0] for word in words}
    if not words or words[0] not in _VERBS or "--device" not in names or {*_ASKED} & names:
        return list(words)
    is_named = not words[1].startswith("-")
    places = (word for before, word in pairwise(words) if before != "--config")
    if is_named or any(Path(word).is_dir() for word in places):
        return list(words)
    return [words[0], NO_DIRECTORY, *words[1:]]


def num_ranks_of(args: argparse.Namespace) -> int:
    """The first number of ``--gpus``; 0 where it is not given."""
    text = str(getattr(args, "gpus", None) or _value(args.options, "--gpus") or "")
    first = text.partition(",")[0].partition("..")[0]
    return whole("gpus", first) if first else 0


def run_words(args: argparse.Namespace) -> list[str]:
    """Megatron's options of a run that a ``config.json`` does not describe."""
    words = [word for word in args.options if not word.startswith("--gpus=")]
    names = {"global_batch_size": "--global-batch-size", "seq_length": "--seq-length"}
    for name, option in names.items():
        value = getattr(args, name, None)
        if value is not None and str(value).isdigit():
            words += [option, str(value)]
    return words


def _value(words: Sequence[str], option: str) -> str | None:
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else next(iter(words[place + 1 :]), None)
    return None
