"""Run descriptions in files: arguments as YAML or JSON, ``config.json``, ours.

Arguments inside a checkpoint are read without running anything in it: torch's ``weights_only``
unpickler builds only allowed classes.  Megatron's classes are replaced by inert ones of the same
name, and a checkpoint that needs any other class is refused.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...calib.arguments import (
    Described,
    apply_options,
    config_from_command,
    config_from_mapping,
    expand,
    from_hugging_face,
    in_its_precision,
    is_known,
    notes_of_keys,
    options_of,
    program_of,
    ranks_of,
    split_launcher,
    titan_options,
)
from ...calib.errors import ConfigError
from ...calib.plain_json import parse_json
from ...calib.workload import TORCHTITAN, VOCAB_MULTIPLE, RunConfig
from .launch_scripts import read_beginning, read_text, script_hint

# YAML aliases can expand without bound; real files have some hundred values.
MAX_VALUES = 100_000
_PLACES = ("common.pt", "mp_rank_00/model_optim_rng.pt", "mp_rank_00_000/model_optim_rng.pt")
_BACKENDS = {1: "flash", 2: "fused", 3: "unfused", 4: "local", 5: "auto"}
"""Members of Megatron core's ``AttnBackend``, which a pickle stores by number."""
_USUAL = re.compile(r"\$\{\w+:(-?)([^}]*)\}")
"""``${NAME:word}``, in which the word is the default of the variable."""
_FOLDERS = tuple(
    folder.format(kind)
    for kind in ("models", "modules")
    for folder in (".", "{}", "{}/megatron", "configs/{}/megatron", "primus/configs/{}/megatron")
)
"""Folders of Primus for models, and for the settings that its modules build on."""
_PARENTS, _MOST_FILES = 6, 30
_BASES = ("bases", "extends", "includes")
_HUGGING_FACE = frozenset({"model_type", "architectures", "is_encoder_decoder"})
_LOGS = (".log", ".out", ".txt")


def read_config(
    path: Path, base: RunConfig, *, num_ranks: int = 0, options: Sequence[str] = ()
) -> Described:
    """Return the run that a file describes, on ``num_ranks`` ranks (0: as many as ``base`` has),
    with ``options`` of Megatron over its arguments.

    ``.yaml`` and ``.json`` hold Megatron's arguments (flat, under ``MODEL_ARGS``, or a dumped
    namespace), a ``RunConfig`` as in the report, or a Hugging Face ``config.json``, whose model and
    16-bit dtype replace those in ``base``; ``.pt`` and a directory are a checkpoint of Megatron;
    ``.log``, ``.out`` and ``.txt`` a log of its training, which begins with all arguments.
    Raises ``ConfigError`` if the file is missing or is none of these.
    """
    ranks = num_ranks or base.parallelism.num_ranks
    value = _parsed(path)
    if "peft_type" in value:
        raise ConfigError(
            f"{path} is of an adapter ({value['peft_type']}), and LoRA is not modelled; for all of "
            f"{value.get('base_model_name_or_path', 'its model')} give that model's config.json"
        )
    is_foreign = not _HUGGING_FACE.isdisjoint(value)
    if is_foreign and not {"num_layers", "hidden_size"} <= value.keys():
        multiple = VOCAB_MULTIPLE * base.parallelism.tp
        length = base.model.seq_length
        model = from_hugging_face(value, seq_length=length, vocab_multiple=multiple)
        config, note = in_its_precision(replace(base, model=model, unmodelled=()), value)
        notes = (*((note,) if note else ()), *notes_of_keys(value, seq_length=length))
        return Described(config=config, unknown=(), notes=notes, has_layout=False)
    model = value.get("model")
    if isinstance(model, Mapping) and "hidden_size" in model and "parallelism" in value:
        return Described(config=RunConfig.from_json(dict(value)), unknown=())
    per_node = base.parallelism.ranks_per_node
    try:
        return config_from_mapping(value, options, num_ranks=ranks, ranks_per_node=per_node)
    except ConfigError as err:
        if "is missing" not in str(err):
            raise
        raise ConfigError(str(err).replace("; give --", f"; add to {path} --")) from err


def described_run(
    path: Path | None,
    command: Sequence[str],
    base: RunConfig,
    *,
    num_ranks: int = 0,
    usual_ranks: int = 0,
) -> Described | None:
    """Return the run that ``--config`` or a command after ``--`` describes; None without either.

    Options alone, without a program, stand over the file.  The run has ``num_ranks`` ranks; 0: as
    many as the launcher or file states, or ``usual_ranks`` without a launcher.  Raises
    ``ConfigError`` if no number is known.
    """
    if path is not None:
        if command and not command[0].startswith("--"):
            return _of_stack(path, command, base, num_ranks)
        return read_config(path, base, num_ranks=num_ranks, options=command)
    if not command:
        return None
    par = base.parallelism
    if not (num_ranks or usual_ranks or ranks_of(split_launcher(command)[0]).num_ranks):
        raise ConfigError("the command does not say how many ranks it starts; give --gpus N")
    return config_from_command(
        command,
        num_ranks=num_ranks,
        usual_ranks=usual_ranks,
        ranks_per_node=par.ranks_per_node if usual_ranks else 0,
    )


_STACKS: Mapping[str, Callable[[Sequence[str], int, int], Sequence[str]]] = {
    TORCHTITAN: titan_options
}
"""Readers of the options of other stacks, whose model a file describes, by their program."""


def _of_stack(path: Path, command: Sequence[str], base: RunConfig, num_ranks: int) -> Described:
    """Return the run of another stack; raise ``ConfigError`` for a program that no reader knows."""
    launcher, words = split_launcher(command)
    program = program_of(command[len(launcher) :]).partition(".")[0]
    if program not in _STACKS:
        raise ConfigError("--config and a command after -- exclude each other; give one")
    ranks = ranks_of(launcher).num_ranks or num_ranks
    if not ranks:
        raise ConfigError("the command does not say how many ranks it starts; give --gpus N")
    described = read_config(path, base, num_ranks=ranks)
    num_layers = described.config.model.num_layers
    config = apply_options(described.config, _STACKS[program](words, ranks, num_layers))
    return replace(described, config=config, has_layout=True)


def completed(command: Sequence[str], options: Sequence[str]) -> tuple[str, ...]:
    """Return a command with further options of a layout, in the spelling of Megatron's parser.

    >>> completed(["pretrain_gpt.py"], ["--gpus=8", "--mbs", "1", "--sp=off"])
    ('pretrain_gpt.py', '--micro-batch-size', '1')
    """
    known = (one for one in options_of(expand(options)) if is_known(one[0][2:].replace("-", "_")))
    return (*command, *(word for option, words in known for word in (option, *words)))


def _parsed(path: Path) -> Mapping[str, Any]:
    if path.is_dir() or path.suffix == ".pt":
        return _checkpoint_arguments(path)
    if path.suffix in _LOGS:
        return _logged(path)
    return _joined(path, _mapping(path), [])


def _mapping(path: Path) -> Mapping[str, Any]:
    if hint := script_hint([str(path)]):
        raise ConfigError(hint)
    text = read_text(path, "give a text file of arguments that exists")
    value = _json(path, text) if path.suffix == ".json" else _yaml(path, text)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} holds no mapping of names to values; write NAME: VALUE lines")
    return value


def _logged(path: Path) -> Mapping[str, Any]:
    """Return the arguments that a log of Megatron's begins with."""
    from ...calib.importers import logged_arguments  # slow to import

    rule = "give the standard output of training, with its list of arguments"
    arguments = logged_arguments(read_beginning(path, rule).decode(errors="replace"))
    if "hidden_size" not in arguments:
        raise ConfigError(f"{path} begins with no list of Megatron's arguments; {rule}")
    return arguments


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
        raise ConfigError(f"{path} is not YAML: {line}; give YAML or JSON") from err
    if not _is_small(value):
        raise ConfigError(f"{path} has more than {MAX_VALUES} values; write NAME: VALUE lines")
    return value


def _is_small(value: Any) -> bool:
    """False if aliases expand to more than ``MAX_VALUES`` values."""
    num_remaining, waiting = MAX_VALUES, [value]
    while waiting and num_remaining > 0:
        num_remaining -= 1
        one = waiting.pop()
        if isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple | set):
            waiting += one
    return not waiting


class _Inert:
    """Placeholder for a Megatron object; stores the arguments of its constructor."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __str__(self) -> str:
        first: Any = self.args[0] if self.args else ""
        is_backend = type(self).__name__ == "AttnBackend"
        return _BACKENDS.get(first, "auto") if is_backend else str(first)


def _checkpoint_arguments(path: Path) -> Mapping[str, Any]:
    """Return names and values of ``args`` in a checkpoint file or in one iteration's directory.

    Raises ``ConfigError`` if torch is not installed, or if the file is not Megatron's or needs a
    class that is not Megatron's.
    """
    file = next((path / p for p in _PLACES if (path / p).exists()), path)
    try:
        import torch
        from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
    except ImportError as err:
        raise ConfigError(f"{file} needs torch to be read; install it, or give YAML") from err
    # Nothing in the file is run: only tensors, plain values and the inert classes are built.
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


def _joined(path: Path, value: Mapping[str, Any], read: list[Path]) -> dict[str, Any]:
    """Return a file's values over those of the files that it, or its module, builds on.

    A file ``extends`` others; ``modules: NAME: {config, model, overrides}`` builds on two and has
    the last word by its overrides.  They lie next to the file, or below ``models`` or ``modules``
    of a parent folder.  ``${NAME:word}`` becomes its word: no variable is looked up.  ``read`` are
    the files on the way here.  Raises ``ConfigError`` if one is missing, or for several modules.
    """
    rest, modules = dict(value), value.get("modules")
    names = [rest.pop(key) for key in _BASES if isinstance(rest.get(key), str | list)]
    if isinstance(modules, Mapping) and all(isinstance(one, Mapping) for one in modules.values()):
        if len(modules) > 1:
            raise ConfigError(f"{path} has modules {', '.join(map(str, modules))}; keep one")
        for part in map(dict, rest.pop("modules").values()):
            names += [
                part.pop(key) for key in ("config", "model") if isinstance(part.get(key), str)
            ]
            if isinstance(part.get("overrides"), Mapping):
                part |= part.pop("overrides")
            rest |= part
    merged: dict[str, Any] = {}
    for named in names:
        for name in [named] if isinstance(named, str) else named:
            merged = _over(merged, _base(path, str(_filled_text(str(name))), read))
    return _over(merged, _filled(rest))


def _base(path: Path, name: str, read: list[Path]) -> dict[str, Any]:
    """Return the values of a file that another builds on."""
    folders = list(path.absolute().parents)[:_PARENTS]
    places = (folder / place / name for folder in folders for place in _FOLDERS)
    place = next((one for one in places if os.path.isfile(one)), None)
    if place is None:
        raise ConfigError(
            f"{path} builds on {name}, which is not beside it; put that file there, or give the "
            "launch line after --"
        )
    read.append(place)
    if len(read) > _MOST_FILES:
        raise ConfigError(f"{path} builds on itself, or on over {_MOST_FILES} files; leave one out")
    return _joined(place, _mapping(place), read)


def _over(base: Any, value: Any) -> Any:
    """Return a value over that of a base, section by section."""
    if not (isinstance(base, Mapping) and isinstance(value, Mapping)):
        return value
    return {**base, **{key: _over(base.get(key), one) for key, one in value.items()}}


def _filled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(one) for key, one in value.items()}
    return _filled_text(value) if isinstance(value, str) else value


def _filled_text(text: str) -> Any:
    """Return a text with its variables' words filled in, as a number or switch if it is one.

    >>> [_filled_text(text) for text in ("${SEQ:4096}", "a-${B:c}", "${D:true}", "$E")]
    [4096, 'a-c', True, '$E']
    """
    filled = _USUAL.sub(lambda match: match[2], text)
    if filled == text:
        return text
    if filled.lower() in ("true", "false"):
        return filled.lower() == "true"
    return int(filled) if filled.removeprefix("-").isdecimal() else filled
