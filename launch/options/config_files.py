"""Descriptions of runs in files: YAML and JSON of Megatron's arguments, ``config.json``, ours.

Those inside a checkpoint are read without running anything that it holds: torch's ``weights_only``
unpickler builds only what it is told to.  Classes of Megatron are replaced by inert ones of the
same name, and a checkpoint that needs any other class is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...calib.arguments import (
    Described,
    config_from_command,
    config_from_mapping,
    from_hugging_face,
    in_its_precision,
    ranks_of,
    split_launcher,
)
from ...calib.errors import ConfigError
from ...calib.plain_json import parse_json
from ...calib.workload import VOCAB_MULTIPLE, RunConfig
from .nested_files import joined

MAX_NBYTES = 1 << 20
"""Of a file of arguments; real ones have a few kB."""
# YAML's aliases unfold without end; real files have some hundred values.
MAX_VALUES = 100_000
_PLACES = ("common.pt", "mp_rank_00/model_optim_rng.pt", "mp_rank_00_000/model_optim_rng.pt")
_BACKENDS = {1: "flash", 2: "fused", 3: "unfused", 4: "local", 5: "auto"}
"""Members of core's ``AttnBackend``, which a pickle keeps by number."""


def read_config(path: Path, own: RunConfig, *, num_ranks: int = 0) -> Described:
    """The run that a file describes, on ``num_ranks`` ranks (0: as many as ``own`` has).

    ``.yaml`` and ``.json`` hold Megatron's arguments (flat, under ``MODEL_ARGS``, or a dumped
    namespace), a ``RunConfig`` as the report has it, or a Hugging Face ``config.json``, whose model
    and 16-bit dtype take the place of those in ``own``; ``.pt`` and a directory are a checkpoint of
    Megatron.  Raises ``ConfigError`` where the file is missing or says something else.
    """
    ranks = num_ranks or own.parallelism.num_ranks
    value = _parsed(path)
    if "model_type" in value and "num_layers" not in value:
        multiple = VOCAB_MULTIPLE * own.parallelism.tp
        model = from_hugging_face(value, seq_length=own.model.seq_length, vocab_multiple=multiple)
        config, note = in_its_precision(replace(own, model=model, unmodelled=()), value)
        return Described(config=config, unknown=(), notes=(note,) if note else ())
    if isinstance(value.get("model"), Mapping) and "parallelism" in value:
        return Described(config=RunConfig.from_json(dict(value)), unknown=())
    return config_from_mapping(
        value, num_ranks=ranks, ranks_per_node=own.parallelism.ranks_per_node
    )


def described_run(
    path: Path | None,
    command: Sequence[str],
    own: RunConfig,
    *,
    num_ranks: int = 0,
    usual_ranks: int = 0,
) -> Described | None:
    """The run that ``--config`` or a command behind ``--`` describes; None where neither is given.

    On ``num_ranks`` ranks, 0: as many as a launcher says, or a file, or ``usual_ranks`` where there
    is no launcher.  Raises ``ConfigError`` where nothing says it.
    """
    if path is not None and command:
        raise ConfigError("--config and a command after -- exclude each other; give one of them")
    if path is not None:
        return read_config(path, own, num_ranks=num_ranks)
    if not command:
        return None
    par = own.parallelism
    if not (num_ranks or usual_ranks or ranks_of(split_launcher(command)[0]).num_ranks):
        raise ConfigError("the command does not say how many ranks it starts; give --gpus N")
    return config_from_command(
        command,
        num_ranks=num_ranks,
        usual_ranks=usual_ranks,
        ranks_per_node=par.ranks_per_node if usual_ranks else 0,
    )


def _parsed(path: Path) -> Mapping[str, Any]:
    if path.is_dir() or path.suffix == ".pt":
        return _checkpoint_arguments(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_NBYTES + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path} cannot be read: {err}; give a text file that exists") from err
    if len(data) > MAX_NBYTES:
        raise ConfigError(f"{path} is larger than {MAX_NBYTES >> 20} MiB; give a file of arguments")
    value = _json(path, text) if path.suffix == ".json" else _yaml(path, text)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} holds no mapping of names to values; write NAME: VALUE lines")
    return joined(path, value, _parsed) if "modules" in value else value


def _json(path: Path, text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as err:
        raise ConfigError(f"{path} is not JSON: {err}; correct it") from err


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError as err:
        raise ConfigError(f"{path} needs PyYAML: pip install PyYAML, or give JSON") from err
    try:
        value = yaml.safe_load(text)
    except RecursionError as err:
        raise ConfigError(f"{path} is nested too deeply; write NAME: VALUE lines") from err
    except (yaml.YAMLError, ValueError, TypeError, ArithmeticError, AttributeError) as err:
        line = " ".join(str(err).split())[:200]
        raise ConfigError(f"{path} is not YAML: {line}; correct it") from err
    if not _is_small(value):
        raise ConfigError(f"{path} has more than {MAX_VALUES} values; write NAME: VALUE lines")
    return value


def _is_small(value: Any) -> bool:
    """False where aliases unfold to more than a file of arguments can mean."""
    left, waiting = MAX_VALUES, [value]
    while waiting and left > 0:
        left -= 1
        one = waiting.pop()
        if isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple | set):
            waiting += one
    return not waiting


class _Inert:
    """Stands for an object of Megatron; keeps what it would have been made of."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __str__(self) -> str:
        first: Any = self.args[0] if self.args else ""
        is_backend = type(self).__name__ == "AttnBackend"
        return _BACKENDS.get(first, "auto") if is_backend else str(first)


def _checkpoint_arguments(path: Path) -> Mapping[str, Any]:
    """Names and values of ``args`` in a checkpoint file or in the directory of one iteration.

    Raises ``ConfigError`` where torch is not installed, the file is none of Megatron's, or it
    needs a class that is not Megatron's.
    """
    file = next((path / p for p in _PLACES if (path / p).exists()), path)
    try:
        import torch
        from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
    except ImportError as err:
        raise ConfigError(f"{file} needs torch to be read; install it, or give YAML") from err
    # Nothing in the file is run: only tensors, plain values and the stand-ins below are built.
    try:
        allowed = [_stand_in(file, name) for name in get_unsafe_globals_in_checkpoint(str(file))]
        with safe_globals(allowed):
            value = torch.load(str(file), map_location="cpu", weights_only=True, mmap=True)
    except ConfigError:
        raise
    except Exception as err:
        line = str(err).splitlines()[0] if str(err) else type(err).__name__
        raise ConfigError(f"{file} is not a checkpoint: {line}; give one of Megatron") from err
    args = value.get("args") if isinstance(value, dict) else None
    if not isinstance(args, argparse.Namespace):
        raise ConfigError(f"{file} holds no args; give a checkpoint of Megatron-LM")
    return vars(args)


def _stand_in(file: Path, name: str) -> Any:
    if name == "argparse.Namespace":
        return argparse.Namespace
    if name.startswith(("megatron.", "signal.")):
        return type(name.rpartition(".")[2], (_Inert,), {}), name
    raise ConfigError(
        f"{file} needs {name}, which is not a class of Megatron and is not loaded; "
        f"give the arguments as YAML"
    )
