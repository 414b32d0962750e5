"""The ``--calibrate`` flags, alias ``--forerun``, and the cluster file.

``split`` decides which arguments are ours.  Standard library only: this is imported before
training, on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

from ..._forerun_autoload import FLAGS as FLAGS
from ..._forerun_autoload import RANKS, closest_option
from ..._forerun_autoload import split as split
from ...calib.arguments.option_words import options_of
from ...calib.errors import ConfigError
from ...calib.records.cluster import KEYS, StatedNodes, stated_nodes
from ...calib.workload.argument_values import option_of
from ...calib.workload.run_options import Flag, Goals, RunOptions, options
from ...hooks.process import interpreter
from ...hooks.process.ranks import SIZES, run_id
from ...hooks.process.settings import CadenceHint, RankInfo, Settings, environ_number
from ._given_files import read_json

FLAG = FLAGS[1]
DEVICE = "FORERUN_DEVICE"
"""Default of ``--calibrate-device``."""
LIMIT = "FORERUN_LIMIT_UNIX_S"
"""Set by ``forerun run``: the time at which the scheduler ends the job, Unix seconds."""
REQUESTS = "FORERUN_REQUESTS"
"""Set to 1 by ``forerun run``: the session accepts requests to save and stop."""


def parse(
    calibrate_flags: Sequence[str],
    environ: Mapping[str, str],
    host_argv: Sequence[str],
    companion_command: Sequence[str],
) -> Settings:
    """Return the settings given by flags, torchrun's variables and the host's arguments.

    Any flag of ours enables calibration.  Of our own variables, ``FORERUN_DEVICE``, which a flag
    overrides, and those set by ``forerun run`` are read here.  Raises ``ConfigError`` with the
    value, the rule and the remedy.
    """
    # The program may change to another directory.
    values: dict[str, Any] = {"directory": RunOptions().directory.absolute()}
    if device := environ.get(DEVICE):
        values["device"] = _read(_OPTIONS["device"][0], device, f"{DEVICE}={device}")
    if limit := environ.get(LIMIT):
        values["limit_unix_s"] = _read(_OPTIONS["deadline"][0], limit, f"{LIMIT}={limit}")
    values |= dict(_value(flag) for flag in calibrate_flags if flag not in FLAGS)
    goals = Goals(**{name: values.pop(name) for name in Goals.__slots__ if name in values})
    if python := values.get("python", ""):
        companion_command = interpreter.companion_command(environ, python)
    return Settings(
        rank=rank_info(environ),
        cadence=cadence_hint(host_argv),
        host_argv=tuple(host_argv),
        companion_command=tuple(companion_command),
        is_answered=True,
        nodes=read_cluster(values.get("cluster")) or StatedNodes(),
        goals=goals,
        takes_requests=environ.get(REQUESTS) == "1",
        **values,
    )


def rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Return rank and world size from the launcher's variables; raises ``ConfigError``.

    Until training begins they are what the launcher states: see ``rank_in_training``.
    """
    rank = _number(environ, "RANK", default=environ_number(environ, RANKS, 0))
    least = 1 if "RANK" in environ else rank + 1
    size = max(least, environ_number(environ, SIZES[1:], 1))
    world_size = _number(environ, "WORLD_SIZE", default=1 if "RANK" in environ else size)
    if rank >= world_size:
        why = f"RANK={rank} must be below WORLD_SIZE={world_size}"
        raise ConfigError(f"{why}; launch with torchrun")
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", default=0),
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", default=1),
        run_id=run_id(environ),
    )


def cadence_hint(host_argv: Sequence[str]) -> CadenceHint:
    """Return the run's length and cadence, if the host's arguments have Megatron's names.

    >>> cadence_hint(["--train-iters", "500", "--save-interval=100"]).save_interval
    100
    """
    values: dict[str, Any] = {}
    said = {option: words for option, words in options_of(host_argv) if words}
    for name in [spec.name for spec in fields(CadenceHint) if spec.default is None]:
        if (text := said.get(option_of(name), [""])[0]).isdecimal():
            values[name] = int(text)
    ramp = said.get("--rampup-batch-size", [])[:3]
    if len(ramp) == 3 and all(word.isdecimal() for word in ramp):
        values["rampup_batch_size"] = tuple(map(int, ramp))
    for name in ("save", "step_batch_size_schedule"):
        values[name] = said.get(option_of(name), [""])[0]
    return CadenceHint(**values)


def _value(written: str) -> tuple[str, Any]:
    """Return the settings field and value that one flag sets."""
    head, equals, text = written.partition("=")
    first = FLAGS[0] if head.startswith(FLAGS[0]) else FLAG
    name = head.removeprefix(first).removeprefix("-")
    if not name:
        raise ConfigError(f"{written}: {first} takes no value; write {first} alone")
    if name not in _OPTIONS:
        hint = f"did you mean {first}-{closest_option(name)}=...? " if closest_option(name) else ""
        known = ", ".join(f"{first}-{known}" for known in _OPTIONS)
        raise ConfigError(f"{written}: unknown flag; {hint}known: {first}, {known}")
    flag, spec = _OPTIONS[name]
    if not equals or not text:
        example = f"{first}-{name}={flag.example}"
        raise ConfigError(f"{written}: needs a value after '='; for example {example}")
    return spec.name, _read(flag, text, written)


def _read(flag: Flag, text: str, written: str) -> Any:
    """Return the value of a text; ``ConfigError`` names it as ``written`` if it has none.

    A path is relative to this directory, and a time without an offset local to this node.
    """
    rule, read = flag.reader
    try:
        value = read(text)
        if isinstance(value, datetime):
            return value.timestamp()
    except (ValueError, OverflowError, OSError):
        message = f"{written}: must be {rule}; give one such as {flag.example}"
        raise ConfigError(message) from None
    return value.absolute() if isinstance(value, Path) else value


_OPTIONS = {flag.name: (flag, spec) for flag, spec in options()}


def _number(environ: Mapping[str, str], key: str, *, default: int) -> int:
    text = environ.get(key, str(default))
    if not re.fullmatch(r"\d+", text, re.ASCII):
        raise ConfigError(f"{key}={text}: must be a whole number; launch with torchrun")
    return int(text)


def read_cluster(path: Path | None) -> StatedNodes | None:
    """Return the nodes that a cluster file states; None if no file is given.

    Raises ``ConfigError`` with the file's name if it is missing, is no JSON object, or states
    something impossible.
    """
    if path is None:
        return None
    value = read_json(path, 'give a JSON file, such as {"joint": "switch", "num_gpus": 8}')
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object; give one with any of {', '.join(KEYS)}")
    try:
        return stated_nodes(value)
    except ConfigError as err:
        raise ConfigError(f"{path}: {err}") from err
