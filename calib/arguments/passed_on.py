"""Masking of secrets in command lines: option names stay, and values only of known options.

Files, tables and logs outlive a run and are read by others, and an argument may be a password.  So
a value stays only if its option is Megatron's, the Hugging Face trainer's, a launcher's or ours;
every other one becomes ``***``, as do passwords in addresses and words such as ``API_KEY=...``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ..records.files import read_package_json
from ..workload.argument_values import name_of
from .megatron_command import split_launcher
from .megatron_options import LISTS, is_known
from .option_words import owners, sayings

MASK = "***"
"""Replacement for a value that is not stored."""
_NAMES = read_package_json(__package__, "kept_names.json")
_KNOWN = frozenset((*_NAMES["trainer"], *_NAMES["launcher"], *_NAMES["batches"]))
"""Options of the trainer and of launchers, and usual batch options of custom loops."""
_MANY = LISTS.union(_NAMES["many"])
"""Options with more than one value."""
_STARTERS = frozenset(_NAMES["starters"])
_SCRIPTS = (".py", ".sh", ".sbatch")
_SECRET = r"key|token|secret|passw|passphrase|pwd|credential|auth"
_HAS_SECRET_NAME = re.compile(_SECRET)
# More than one letter after a single dash may include a value (-pSECRET).
_NAME = re.compile(r"-{1,2}[A-Za-z][\w.-]*|--")
_ASSIGNED = re.compile(r"(\+{0,2}[A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s\"',;&]+)"
_ADDRESS = re.compile(r"(?<=://)(?:[^\s'\"]*:[^\s'\"]*|[^/\s'\"]*)@")
_OPTION_IN_TEXT = re.compile(rf"(--?([A-Za-z][\w.-]*)(?:=|\s+(?!-)))({_VALUE})")
_ASSIGNED_IN_TEXT = re.compile(rf"(([A-Za-z_][\w.-]*)=)({_VALUE})")
# Headers and dumped mappings: ``Authorization: Bearer abc``, ``'token': 'abc'``.
_ENTRY_IN_TEXT = re.compile(
    rf"([\"']?\b([A-Za-z_][\w.-]*)[\"']?\s*:\s*(?:(?:Basic|Bearer)\s+)?)({_VALUE})"
)


def masked_arguments(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a program and its arguments, with ``***`` for all that may be secret.

    The number of words stays, so that positions are the same; masking again changes nothing.

    >>> masked_arguments(["t.py", "--lr", "1", "--hub-token", "abc", "--vault=def", "ghi"])
    ('t.py', '--lr', '1', '--hub-token', '***', '--vault=***', '***')
    """
    return (masked_text(argv[0]), *_masked_words(argv[1:])) if argv else ()


def masked_command(command: Sequence[str]) -> tuple[str, ...]:
    """Mask a complete command line, including a launcher such as torchrun.

    >>> masked_command(["env", "HF_TOKEN=abc", "torchrun", "--nnodes", "2", "t.py", "--pin", "1"])
    ('env', 'HF_TOKEN=***', 'torchrun', '--nnodes', '2', 't.py', '--pin', '***')
    """
    place = len(command) - len(split_launcher(command)[1]) or len(command)
    front = list(_masked_words(command[:place]))
    for index, word in enumerate(command[:place]):
        name = word.rpartition("/")[2]
        is_module = index > 0 and command[index - 1] in ("-m", "--module")
        if index == 0 or is_module or name in _STARTERS or name.endswith(_SCRIPTS):
            front[index] = masked_text(word)
    return (*front, *_masked_words(command[place:]))


def unmask_arguments(advised: Sequence[str], host_argv: Sequence[str]) -> tuple[str, ...]:
    """Return a masked command line with the values of ``host_argv``; empty if one is missing.

    Values of the same option are taken in order.

    >>> unmask_arguments(["t.py", "--pin", "***", "--tp", "2"], ["t.py", "--pin", "12"])
    ('t.py', '--pin', '12', '--tp', '2')
    """
    values: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    masked = masked_arguments(host_argv)
    for (option, word), real in zip(owners(masked), host_argv, strict=True):
        if word != real:
            values[option, word].append(real)
    out: list[str] = []
    for option, word in owners(advised):
        if MASK not in word:
            out.append(word)
            continue
        # A resumed command loads the checkpoint that the previous one saved.
        original_values = (
            values[option, word] or values["--save" if option == "--load" else option, word]
        )
        if not original_values:
            return ()
        out.append(original_values.pop(0) if len(original_values) > 1 else original_values[0])
    return tuple(out)


def is_secret_name(name: str) -> bool:
    """Return True for names of options, variables and keys whose value is likely a secret.

    >>> [is_secret_name(name) for name in ("HF_TOKEN", "--api-key", "tokenizer_type", "lr")]
    [True, True, False, False]
    """
    plain = name_of(name.lower().lstrip("-+"))
    if is_known(plain) or plain in _KNOWN:
        return False
    return _HAS_SECRET_NAME.search(re.sub(r"[_.]", "", plain)) is not None


def masked_text(text: str) -> str:
    """Mask passwords in addresses, and values whose name suggests a secret.

    >>> masked_text("no answer from https://me:abc@host/x?api_key=def with --hub-token ghi")
    'no answer from https://***@host/x?api_key=*** with --hub-token ***'
    """
    text = _ADDRESS.sub(MASK + "@", text)
    for pattern in (_OPTION_IN_TEXT, _ASSIGNED_IN_TEXT, _ENTRY_IN_TEXT):
        text = pattern.sub(_masked_match, text)
    return text


def _masked_match(match: re.Match[str]) -> str:
    name = match[2]
    is_secret = is_secret_name(name) and not name.endswith(("Error", "Exception"))
    return match[1] + MASK if is_secret else match[0]


def _masked_words(words: Sequence[str]) -> Iterator[str]:
    """Yield options and their values, masked; words that belong to no option are masked too."""
    for said in sayings(words):
        name, is_public = said.option, _is_public_option(said.option)
        if name and (_NAME.fullmatch(name) is None or (name[1:2] != "-" and len(name) > 2)):
            yield name[:2] + MASK
        elif said.joined is not None:
            yield f"{name}={masked_text(said.joined) if is_public else MASK}"
        elif name:
            yield name
        num_values = _num_words(name) if is_public and said.joined is None else 0
        for place, word in enumerate(said.after):
            yield masked_text(word) if place < num_values else _masked_word(word)


def _masked_word(word: str) -> str:
    """Return a word that is no option's value: an assignment of a known name stays."""
    assigned = _ASSIGNED.fullmatch(word)
    if assigned is None:
        return MASK
    is_public = _is_public_option("--" + assigned[1].lstrip("+").rpartition(".")[2])
    return f"{assigned[1]}={masked_text(assigned[2]) if is_public else MASK}"


def _is_public_option(option: str) -> bool:
    if not option.startswith("--"):
        return False
    name = name_of(option)
    if name.partition("_")[0] in ("calibrate", "forerun"):
        return not is_secret_name(name)
    # Dotted paths (``--training.local_batch_size``) are recognized by their last part.
    end = name.rpartition(".")[2]
    return is_known(end) or end in _KNOWN


def _num_words(option: str) -> int:
    return 1_000_000 if name_of(option) in _MANY else 1
