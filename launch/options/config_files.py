"""Run descriptions in files: arguments as YAML or JSON, ``config.json``, ours, shell scripts.

Arguments inside a checkpoint are read without running anything in it: torch's ``weights_only``
unpickler builds only allowed classes.  Megatron's classes are replaced by inert ones of the same
name, and a checkpoint that needs any other class is refused.  Scripts are read, never run.
"""

from __future__ import annotations

import argparse
import os
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path, PurePath
from typing import Any

from ...calib.arguments import (
    BATCH,
    EXPANSION,
    SHELLS,
    Described,
    Word,
    commands,
    config_from_command,
    config_from_mapping,
    expand,
    from_hugging_face,
    in_its_precision,
    inline_script,
    is_known,
    notes_of_keys,
    of_options,
    options_of,
    ranks_of,
    split_front,
    split_launcher,
    split_variables,
)
from ...calib.errors import ConfigError
from ...calib.plain_json import parse_json
from ...calib.workload import VOCAB_MULTIPLE, RunConfig

MAX_NBYTES = 1 << 20
"""Size limit of a file of arguments; real ones have a few kB."""
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
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_REDIRECTED = re.compile(r"^\d*(?:>>?|<)(?:&\d*)?")
_SIZES = ("--num-layers", "--hidden-size")
_NAMING = ("echo", "printf", "[", "[[", "test", "source", ".")
"""Words of a shell behind which a script is only named."""
_MOST_DEEP = 4


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
            raise ConfigError("--config and a command after -- exclude each other; give one")
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
    text = _text(path, "give a text file of arguments that exists")
    value = _json(path, text) if path.suffix == ".json" else _yaml(path, text)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} holds no mapping of names to values; write NAME: VALUE lines")
    return value


def script_hint(words: Sequence[str]) -> str:
    """Return how to give the script among words; empty if none is one."""
    script = next((word for word in words if word.endswith(_SCRIPTS)), "")
    return f"{script} is a script; give it after --, such as -- bash {script}" if script else ""


def _logged(path: Path) -> Mapping[str, Any]:
    """Return the arguments that a log of Megatron's begins with."""
    from ...calib.importers import logged_arguments  # slow to import

    rule = "give the standard output of training, with its list of arguments"
    arguments = logged_arguments(_beginning(path, rule).decode(errors="replace"))
    if "hidden_size" not in arguments:
        raise ConfigError(f"{path} begins with no list of Megatron's arguments; {rule}")
    return arguments


def _beginning(path: Path, rule: str) -> bytes:
    """Return at most a byte more than ``MAX_NBYTES``."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_NBYTES + 1)
    except OSError as err:
        raise ConfigError(f"{path} cannot be read: {err}; {rule}") from err


def _text(path: Path, rule: str) -> str:
    data = _beginning(path, rule)
    if len(data) > MAX_NBYTES:
        raise ConfigError(f"{path} is larger than {MAX_NBYTES >> 20} MiB; {rule}")
    try:
        return data.decode()
    except UnicodeDecodeError as err:
        raise ConfigError(f"{path} cannot be read: {err}; {rule}") from err


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


def inner_launch_line(words: Sequence[str]) -> tuple[str, ...]:
    """Return the launch line inside ``bash run.sh``, ``sbatch run.sh`` or ``srun bash -c TEXT``.

    Other lines are returned unchanged.  Raises ``ConfigError`` if a script cannot be read, or no
    training script can be identified from its text alone.
    """
    for _ in range(_MOST_DEEP):
        place = _wrapper(words)
        if place is None:
            break
        words = _inside(words, place)
    return tuple(words)


def _wrapper(words: Sequence[str]) -> int | None:
    """Return the index of a shell, batch command or shell script before any training script."""
    launcher, arguments = split_launcher(words)
    is_script = bool(launcher) or len(arguments) < len(words)
    front = launcher if is_script else words
    names = (*SHELLS, *BATCH)
    places = (n for n, w in enumerate(front) if PurePath(w).name in names or w.endswith(_SCRIPTS))
    return next(places, None)


def _inside(words: Sequence[str], place: int) -> tuple[str, ...]:
    return (*words[:place], *_script_at(words, place).launch)


def _script_at(words: Sequence[str], place: int) -> LaunchScript:
    rest = words[place:]
    variables, starter = split_variables(words[:place])
    front = {"starter": starter, "exported": variables}
    if (script := inline_script(rest)) is not None:
        name = f"{rest[0]} -c"
        return LaunchScript(name=name, text=script[1], variables=variables, **front)
    behind = rest if rest[0].endswith(_SCRIPTS) else rest[1:]
    word = next((one for one in behind if os.path.isfile(one)), None)
    if word is None:
        shown = " ".join(rest[:3])
        raise ConfigError(f"{shown}: no script that can be read; give the launch line itself")
    options = rest[1 : rest.index(word)] if PurePath(rest[0]).name in BATCH else ()
    variables = {**of_options(options), **variables}
    given = behind[behind.index(word) + 1 :]
    variables |= {"#": str(len(given)), **{str(n): one for n, one in enumerate(given, 1)}}
    text = _text(Path(word), "give the launch line itself")
    return LaunchScript(
        name=str(Path(word)),
        text=text,
        variables=variables,
        **front,
        options=tuple(options),
    )


_PIECES = re.compile(
    r"""(?s)(?<!\S)(?P<note>\#[^\n]*)|\\.|'[^']*'|"(?:\\.|[^"\\])*"|(?P<out>\d*(?:&>|[<>]))"""
    r"""|(?P<end>\n|;;?|&&|\|\|?|(?<![<>])&)"""
)
"""Quotes, comments, redirections, and what ends a command."""
_COMPUTED = re.compile(
    r"""(?m)^[ \t]*(?:export[ \t]+)?\w+="?"""
    r"""(?:\$\((?!\()[^()\n]*(?:\([^()\n]*\)[^()\n]*)*\)|`[^`\n]*`)"?[ \t]*$"""
)
"""An assignment of a command's output, which leaves the variable to the shell."""
_FRONT = re.compile(
    r"""(?s)\s*(?:(?:then|do|else|\{|exec|env|time)\s+)*"""
    r"""(?:[A-Za-z_]\w*=(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^\s'"\\;|&])*(?:\s|\\\n)+)*"""
)
"""Words of a shell and assignments in front of a command."""
_SETS = re.compile(r"""<<|["'\s;]\w+=|\bexport\b""")
"""Variables of a script within a command, which would be lost with it."""
_OF_A_TASK = re.compile(r"SLURM_(?:PROC|NODE|LOCAL)ID$|HOSTNAME$")


@dataclass(frozen=True, kw_only=True)
class LaunchScript:
    """A script of the user's, and where it starts training."""

    name: str
    text: str
    variables: Mapping[str, str]
    """Variables that are set for it, its arguments by their number."""
    starter: tuple[str, ...] = ()
    """Words in front of the shell that runs it."""
    options: tuple[str, ...] = ()
    """Options of ``sbatch`` in front of it."""
    exported: Mapping[str, str] = field(default_factory=dict)
    """Variables set in front of the shell that runs it."""

    @cached_property
    def launch(self) -> tuple[str, ...]:
        """Words of the command that starts training."""
        return _launch(self._commands(self.text), self.name)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments that the script is given."""
        return tuple(self.variables[str(n + 1)] for n in range(int(self.variables.get("#", 0))))

    def _commands(self, text: str) -> list[tuple[str, ...]]:
        try:
            known = _COMPUTED.sub(lambda one: " " * len(one[0]), text)
            return [tuple(_without_redirection(one)) for one in commands(known, self.variables)]
        except ConfigError:
            if text == self.text:
                raise
            return []  # cut within a quote

    @cached_property
    def _span(self) -> tuple[int, int]:
        """Begin and end of the simple command that starts training; equal if there is not one."""
        text = self.text
        ends = [0, *(one.end() for one in _PIECES.finditer(text) if one["end"]), len(text)]
        last = bisect_left(ends, True, key=lambda end: self.launch in self._commands(text[:end]))
        begin = ends[max(last - 1, 0)]
        before, until = self._commands(text[:begin]), self._commands(text[: ends[last]])
        if match := _FRONT.match(text, begin):
            begin = match.end()
        pieces = _PIECES.finditer(text, begin)
        end = next((one.start() for one in pieces if one.lastgroup), len(text))
        word = re.escape("".join(text[begin:end].split()[:1]))
        is_called = re.search(rf"(?m)^\s*(?:function\s+{word}\b|{word}\s*\(\))", text)
        is_one = len(until) == len(before) + 1 and self._commands(text).count(self.launch) == 1
        return (begin, end if is_one and not is_called else begin)

    def refusal(self, words: Sequence[Word]) -> str:
        """Return why no other command can stand in the place of the launch, such as a word that the
        shell would not replace as it does now; empty if one can."""
        begin, end = self._span
        numberless = {name: value for name, value in self.variables.items() if name != "#"}
        if self.starter or _wrapper(self.launch) is not None:
            return f"{self.name} is one of several scripts or commands; give the inner one alone"
        if not self.arguments and replace(self, variables=numberless).launch != self.launch:
            return f"{self.name} takes arguments; give them behind it"
        if begin == end or _SETS.search(self.text[begin:end]):
            return f"{self.name} starts training at no single place; give the launch line itself"
        is_of_srun = "srun" in [PurePath(word.text).name for word in words]
        for text in [word.text for word in words if set("$`") & set(word.text)]:
            names = ["".join(found) for found in EXPANSION.findall(text)]
            rest = set("$`") & set(EXPANSION.sub("", text))
            is_literal = any(re.search(rf"\$\{{?{name}\b", self._literal) for name in names)
            is_of_task = is_of_srun and any(map(_OF_A_TASK.match, names))
            is_open = EXPANSION.fullmatch(text) and len(self._quotes(text)) != 1
            if rest or is_literal or is_of_task or is_open:
                return f"{text} in {self.name} is not known before it runs; write its value there"
        return ""

    @cached_property
    def _literal(self) -> str:
        """Everything in single quotes, or after a backslash."""
        quotes = [one[0] for one in _PIECES.finditer(self.text) if one[0][0] == "'"]
        return " ".join((*quotes, *re.findall(r"\\(\$\{?\w+)", self.text)))

    def _quotes(self, text: str) -> set[str]:
        """Return the quotes around a variable that is a whole word: in the command, or else in the
        script."""
        form = rf"(?<![^\s(])(\"?){re.escape(text)}\1(?![^\s)])"
        return set(re.findall(form, self.text[slice(*self._span)]) or re.findall(form, self.text))

    def in_shell(self, word: Word) -> Word:
        """Return a word of the command with its variables left to the shell."""
        is_open = bool(EXPANSION.search(word.text)) and word.blank is None
        return replace(word, is_open=is_open, is_split=is_open and self._quotes(word.text) == {""})

    def with_launch(self, command: str, words: Sequence[str]) -> str:
        """Return the text with another command in the place of the launch.

        Raise ``ConfigError`` if it does not read as these words; those with a ``$`` may differ.
        """
        begin, end = self._span
        text = f"{self.text[:begin]}{command} {self.text[end:]}"
        found = split_front(_launch(self._commands(text), self.name))[1]
        pairs = [(a, b) for a, b in zip_longest(found, words, fillvalue="") if a != b]
        if wrong := [b or a for a, b in pairs if "$" not in f"{a}{b}"]:
            raise ConfigError(
                f"{self.name} would not start {wrong[0]}; give the launch line itself"
            )
        return text


def launch_script(words: Sequence[str]) -> LaunchScript | None:
    """Return the script that ``sbatch run.sh`` or ``bash -c TEXT`` runs; None for a launch line.

    Raise ``ConfigError`` if it cannot be read.
    """
    place = _wrapper(words)
    return None if place is None else _script_at(words, place)


def _launch(command_lines: Sequence[Sequence[str]], name: str) -> tuple[str, ...]:
    """Return the training command: the last one, preferring those that state the model's sizes."""
    trains = [tuple(one) for one in command_lines if _trains(one)]
    sized = [one for one in trains if any(word in _SIZES for word in one)]
    if not trains:
        raise ConfigError(
            f"{name}: its text names no training script, and Forerun does not execute it; "
            "give the launch line itself after --"
        )
    return (sized or trains)[-1]


def _trains(words: Sequence[str]) -> bool:
    """Return True for a command that may train: it runs a script, or a module under a launcher."""
    if next(iter(split_variables(words)[1]), "") in _NAMING:
        return False
    is_launched = bool(ranks_of(split_launcher(words)[0]).launcher)
    return is_launched or any(word.endswith(".py") for word in words) or _wraps(words)


def _wraps(words: Sequence[str]) -> bool:
    place = _wrapper(words)
    return place is not None and len(words) > place + 1


def _without_redirection(words: Sequence[str]) -> Iterator[str]:
    is_target = False
    for word in words:
        match = _REDIRECTED.match(word)
        if match is not None:
            is_target = match.end() == len(word) and "&" not in word
        elif is_target:
            is_target = False
        else:
            yield word
