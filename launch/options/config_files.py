"""Run descriptions in files: arguments as YAML or JSON, logs, ``config.json``, ours."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...calib.arguments.hugging_face import from_hugging_face, in_its_precision
from ...calib.arguments.hugging_face_shape import notes_of_keys
from ...calib.arguments.launchers import GPUS_PER_NODE, ranks_of
from ...calib.arguments.megatron_args import apply_options
from ...calib.arguments.megatron_command import (
    Described,
    config_from_command,
    config_from_mapping,
    program_of,
    ranks_unknown,
    split_launcher,
)
from ...calib.arguments.megatron_options import is_known
from ...calib.arguments.option_words import options_of
from ...calib.arguments.short_names import expand
from ...calib.arguments.torchtitan_options import titan_options
from ...calib.errors import ConfigError, UnreadError
from ...calib.workload.argument_values import name_of
from ...calib.workload.config import TORCHTITAN, VOCAB_MULTIPLE, Batch, Precision, RunConfig
from ...calib.workload.model_shape import ModelShape
from ...calib.workload.parallelism import Parallelism
from ...leaves import leaf
from ._given_files import read_beginning, read_json, read_text
from .launch_scripts import LaunchScript, script_hint

# YAML aliases can expand without bound; real files have some hundred values.
MAX_VALUES = 100_000
_USUAL = re.compile(r"\$\{\w+:(-?)([^}]*)\}")
"""``${NAME:word}``, in which the word is the default of the variable."""
_MOST_FILES = 30
_EXTENDS = "extends"
_USUAL_LENGTH = 8192
"""Tokens of a sample that no file and nobody states."""
_HUGGING_FACE = frozenset({"model_type", "architectures", "is_encoder_decoder"})
_LOGS = (".log", ".out", ".txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run whose model no file has described yet: replicas with the defaults of Megatron's
    recipes, bf16 and an overlapping distributed optimizer."""

    device: str
    """Driver's name."""
    num_ranks: int
    """0: not stated."""

    @property
    def parallelism(self) -> Parallelism:
        """Data parallel alone."""
        return Parallelism(
            dp=max(self.num_ranks, 1),
            is_optimizer_distributed=True,
            overlaps_grad_reduce=True,
            overlaps_param_gather=True,
            ranks_per_node=min(GPUS_PER_NODE, self.num_ranks or GPUS_PER_NODE),
        )

    def with_model(self, model: ModelShape) -> RunConfig:
        """Return the run of a model, with one sample a step on each rank."""
        return RunConfig(
            model=model,
            parallelism=self.parallelism,
            batch=Batch(micro_batch_size=1, global_batch_size=max(self.num_ranks, 1)),
            precision=Precision.BF16,
            fuses_norms=True,
            device=self.device,
        )


def read_config(
    path: Path, base: RunConfig | OpenRun, *, num_ranks: int = 0, options: Sequence[str] = ()
) -> Described:
    """Return the run that a file describes, on ``num_ranks`` ranks (0: as many as ``base`` has),
    with ``options`` of Megatron over its arguments.

    ``.yaml`` and ``.json`` hold Megatron's arguments (flat, in sections, or a dumped namespace), a
    ``RunConfig`` as in the report, or a Hugging Face ``config.json``, whose model and 16-bit dtype
    replace those in ``base``; ``.log``, ``.out`` and ``.txt`` are a log of training, which begins
    with all arguments.  Raises ``ConfigError`` if the file is missing or is none of these.
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
        is_open = isinstance(base, OpenRun)
        length = _USUAL_LENGTH if is_open else base.model.seq_length
        model = from_hugging_face(value, seq_length=length, vocab_multiple=multiple)
        run = base.with_model(model) if is_open else replace(base, model=model, unmodelled=())
        config, note = in_its_precision(run, value)
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
    base: RunConfig | OpenRun,
    *,
    num_ranks: int = 0,
    usual_ranks: int = 0,
    script: LaunchScript | None = None,
) -> Described | None:
    """Return the run that ``--config`` or a command after ``--`` describes; None without either.

    Options alone, without a program, stand over the file.  The run has ``num_ranks`` ranks; 0: as
    many as the launcher or file states, or ``usual_ranks`` without a launcher.  Raises
    ``ConfigError`` if no number is known; it names the files that ``script``, of which the command
    is the launch, takes settings from.
    """
    try:
        return _described_run(path, command, base, num_ranks, usual_ranks)
    except UnreadError as err:
        if script is None or not script.sourced:
            raise
        files = ", ".join(script.sourced)
        raise UnreadError(
            f"{err}; {script.name} takes settings from {files}, which is not opened"
        ) from err


def _described_run(
    path: Path | None,
    command: Sequence[str],
    base: RunConfig | OpenRun,
    num_ranks: int,
    usual_ranks: int,
) -> Described | None:
    if path is not None:
        if command and not command[0].startswith("--"):
            return _of_stack(path, command, base, num_ranks)
        return read_config(path, base, num_ranks=num_ranks, options=command)
    if not command:
        return None
    par = base.parallelism
    if not (num_ranks or usual_ranks or ranks_of(split_launcher(command)[0]).num_ranks):
        raise ranks_unknown(command)
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


def _of_stack(
    path: Path, command: Sequence[str], base: RunConfig | OpenRun, num_ranks: int
) -> Described:
    """Return the run of another stack; raise ``ConfigError`` for a program that no reader knows."""
    launcher, words = split_launcher(command)
    program = program_of(command[len(launcher) :]).partition(".")[0]
    if program not in _STACKS:
        raise ConfigError("--config and a command after -- exclude each other; give one")
    ranks = ranks_of(launcher).num_ranks or num_ranks
    if not ranks:
        raise ranks_unknown(command)
    described = read_config(path, base, num_ranks=ranks)
    num_layers = described.config.model.num_layers
    config = apply_options(described.config, _STACKS[program](words, ranks, num_layers))
    return replace(described, config=config, has_layout=True)


def completed(command: Sequence[str], options: Sequence[str]) -> tuple[str, ...]:
    """Return a command with further options of a layout, in the spelling of Megatron's parser.

    >>> completed(["pretrain_gpt.py"], ["--gpus=8", "--mbs", "1", "--sp=off"])
    ('pretrain_gpt.py', '--micro-batch-size', '1')
    """
    known = (one for one in options_of(expand(options)) if is_known(name_of(one[0])))
    return (*command, *(word for option, words in known for word in (option, *words)))


def _parsed(path: Path) -> Mapping[str, Any]:
    if path.is_dir() or path.suffix == ".pt":
        raise ConfigError(
            f"{path} is a checkpoint, and only text is read; give the log of its training, which "
            "begins with its arguments, or these as YAML or JSON"
        )
    return _logged(path) if path.suffix in _LOGS else _extended(path, [])


def _mapping(path: Path) -> Mapping[str, Any]:
    if hint := script_hint([str(path)]):
        raise ConfigError(hint)
    rule = "give a text file of arguments that exists"
    value = read_json(path, rule) if path.suffix == ".json" else _yaml(path, read_text(path, rule))
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} holds no mapping of names to values; write NAME: VALUE lines")
    return value


def _logged(path: Path) -> Mapping[str, Any]:
    """Return the arguments that a log of Megatron's begins with."""
    rule = "give the standard output of training, with its list of arguments"
    logged_arguments = leaf("...calib.importers.training_log:logged_arguments", __package__ or "")
    if logged_arguments is None:
        raise ConfigError(f"{path} is a log, whose reader is not installed; give the launch line")
    arguments = logged_arguments(read_beginning(path, rule).decode(errors="replace"))
    if "hidden_size" not in arguments:
        raise ConfigError(f"{path} begins with no list of Megatron's arguments; {rule}")
    return arguments


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


def _extended(path: Path, read: list[Path]) -> dict[str, Any]:
    """Return a file's values over those of the files that it ``extends``, which it names from its
    own folder; ``read`` are the files on the way here.

    ``${NAME:word}`` becomes its word: no variable is looked up.
    """
    read.append(path)
    if len(read) > _MOST_FILES:
        raise ConfigError(f"{path} extends itself, or over {_MOST_FILES} files; leave one out")
    value, merged = dict(_mapping(path)), dict[str, Any]()
    names = value.pop(_EXTENDS) if isinstance(value.get(_EXTENDS), str | list) else []
    for name in [names] if isinstance(names, str) else names:
        extended = path.parent / str(_filled_text(str(name)))
        if not os.path.isfile(extended):
            raise ConfigError(
                f"{path} extends {name}, which is not beside it; put that file there, or give the "
                "launch line after --"
            )
        merged = _over(merged, _extended(extended, read))
    return _over(merged, _filled(value))


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
