"""Entry point in the group ``torch.backends``: torch calls ``load`` at the end of its import.

It is a top-level module next to the package, with a unique name and copied into every
installation, because ``import torch`` fails if an entry point cannot be loaded; this one loads
even if the package is broken or gone.  It uses the standard library only and lets no exception
escape.  If Forerun is not requested, it inspects the arguments and returns.

Processes are told apart as follows.  A *launcher* (torchrun and the like) passes our flags on, even
if rank variables are exported around it.  A *worker* is any other program, however it was started:
the flags are removed from its arguments and it starts and owns the session, also across ``exec``.
The session stays silent until something trains, and ``torch.distributed`` then tells the rank.  A
child of a worker loses the same flags and starts no session, unless it has a local rank of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from types import CodeType, FrameType
from typing import NamedTuple

OFF = "FORERUN_OFF"
"""Set to 1 by the user to disable Forerun: no flag is taken, nothing starts or prints."""
OWNER = "FORERUN_OWNER"
"""Set here, never by a user: the process that owns the session, as ``pid:start``."""
TAKEN = "FORERUN_TAKEN"
"""Set here, never by a user: the flags that the owner took from its arguments."""
_BETWEEN = "\x1f"
FLAGS = ("--forerun", "--calibrate")
"""Two prefixes of the same flags; the first is never used by another program."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


OPTIONS = _names(
    "steps every total-steps dir on-advice deadline budget-hours restart-cost mtbf-hours "
    "price-per-gpu-hour confidence gpus python probe-seconds wandb tensorboard "
    "prometheus trainjob slurm-comment device trace cluster"
)
"""Option names after ``--forerun-`` or ``--calibrate-``."""
PROGRAMS = _names(
    "accelerate accelerate-launch colossalai composer deepspeed deepspeed.pt ds fabric forerun "
    "horovodrun ipexrun lightning ray torchrun torchx tune"
)
"""Launchers, by command name."""
MODULES = _names(
    "accelerate.commands colossalai.cli composer.cli deepspeed.launcher forerun.launch.cli "
    "horovod.runner intel_extension_for_pytorch.cpu.launch lightning.fabric.cli "
    "lightning_fabric.cli ray.scripts torch.backends.xeon torch.distributed.elastic "
    "torch.distributed.launch torch.distributed.launcher torch.distributed.run torchtune._cli "
    "torchx"
)
"""Launchers, by module name; submodules are included."""
TOOLS = _names("ipykernel ipykernel_launcher ipython jupyter pip py.test pytest")
"""Programs that run other people's code, by command or module name: no flag of theirs is ours."""
RANKS = _names("RANK OMPI_COMM_WORLD_RANK PMI_RANK SLURM_PROCID LOCAL_RANK")
"""Variables of a rank: torchrun's, Open MPI's, MPICH's, Slurm's, and Lightning's for ranks that it
starts itself."""
LOCAL_RANKS = _names("LOCAL_RANK OMPI_COMM_WORLD_LOCAL_RANK MPI_LOCALRANKID SLURM_LOCALID")
"""Variables of a rank within its node."""
_WITH_VALUE = ("alias option", "option")
"""Argument kinds whose value may be a separate word."""
_CLOSE = 0.8
"""Minimum ``difflib`` similarity for an unknown name to count as a typo."""


class FlagSplit(NamedTuple):
    """Argument list split into our flags, the host's arguments in order, and the host's lookalikes.

    An option of ours whose value was a separate word is joined to it by ``=``.
    """

    flags: tuple[str, ...]
    rest: tuple[str, ...]
    lookalikes: tuple[str, ...] = ()

    @property
    def present(self) -> bool:
        """True if any flag is ours."""
        return bool(self.flags)


def split(argv: Sequence[str]) -> FlagSplit:
    """Split off our flags; everything after a bare ``--`` belongs to the host.

    With any ``--forerun`` present, only ``--forerun`` and ``--forerun-...`` are ours.  Otherwise
    ``--calibrate-steps=8``, or any other option known here, makes every ``--calibrate`` and every
    typo of an option ours.  Otherwise ``--calibrate`` alone is ours, unless the arguments show that
    it is another program's: a value follows it, or an option is not known here.

    >>> split(["--lr", "1", "--calibrate", "--calibrate-steps=8"]).rest
    ('--lr', '1')
    >>> split(["--calibrate", "--calibrate-momentum", "0.9"]).flags
    ()
    """
    end = list(argv).index("--") if "--" in argv else len(argv)
    head = tuple(argv[:end])
    kinds = [_kind(head, index) for index in range(end)]
    ours = _ours(kinds)
    flags: list[str] = []
    rest: list[str] = []
    for index, (word, kind) in enumerate(zip(head, kinds, strict=True)):
        is_value = index > 0 and kinds[index - 1] in ours and kinds[index - 1] in _WITH_VALUE
        if is_value and _has_value(head, index - 1):
            flags[-1] += "=" + word
        else:
            (flags if kind in ours else rest).append(word)
    lookalikes = (word for word, kind in zip(head, kinds, strict=True) if kind and kind not in ours)
    return FlagSplit(tuple(flags), (*rest, *argv[end:]), tuple(lookalikes))


def _ours(kinds: Sequence[str]) -> tuple[str, ...]:
    if "alias" in kinds or "alias option" in kinds:
        return ("alias", "alias option")
    if "sure" in kinds:
        return ("sure", "option", "bare", "valued", "slip")
    if "bare" in kinds and not {"foreign", "valued", "option"} & set(kinds):
        return ("bare", "slip")
    return ()


def _kind(words: Sequence[str], index: int) -> str:
    """Return the kind of one argument; empty if it cannot be ours."""
    flag, equals, _ = words[index].partition("=")
    alias, name = FLAGS
    if flag == alias or flag.startswith(alias + "-"):
        return "alias" if equals or flag == alias else "alias option"
    if flag == name:
        if equals:
            return "foreign"
        return "valued" if _has_value(words, index) else "bare"
    if flag.startswith(name + "_"):
        return "foreign"
    if not flag.startswith(name + "-"):
        return ""
    option = flag[len(name) + 1 :]
    if option in OPTIONS:
        return "sure" if equals else "option"
    return "slip" if equals and closest_option(option) else "foreign"


def closest_option(option: str) -> str:
    """Return our option closest to a misspelt one; empty if none is close."""
    import difflib

    return next(iter(difflib.get_close_matches(option, OPTIONS, n=1, cutoff=_CLOSE)), "")


def _has_value(words: Sequence[str], index: int) -> bool:
    if index + 1 >= len(words):
        return False
    word = words[index + 1]
    return not word.startswith("-") or word == "-" or word[1:2].isdigit() or word[1:2] == "."


def load(*, is_explicit: bool = False) -> None:
    """Start the requested session if this is a worker; a second call does nothing.

    ``is_explicit``: the command names Forerun, so every flag of ours is meant for it.
    """
    try:
        _load(os.environ, is_explicit)
    except (Exception, SystemExit) as err:  # a fault of ours must not stop training
        print_note(f"{type(err).__name__}: {err}; calibration is off, training goes on")


def _load(environ: MutableMapping[str, str], is_explicit: bool) -> None:
    words = tuple(getattr(sys, "argv", None) or ())[1:]
    is_enabled_by_environ = (
        environ.get("FORERUN_CALIBRATE") == "1" or environ.get("FORERUN_DEVICE") == "cpu"
    )
    is_enabled_by_environ = is_enabled_by_environ or OWNER in environ or TAKEN in environ
    if not is_enabled_by_environ and not any(word.startswith(FLAGS) for word in words):
        return
    if is_launcher():
        _release(environ)
        return
    flag_split = split(words)
    is_launched = "RANK" in environ and (is_explicit or "LOCAL_RANK" in environ)
    is_worker = is_launched or is_explicit or _is_training_program()
    owner = _owner(environ)
    is_alias = any(flag.startswith(FLAGS[0]) for flag in flag_split.flags)
    if is_off(environ):
        if is_worker and is_alias:
            sys.argv[1:] = flag_split.rest
    elif owner == "another" and (not is_worker or _local_rank(environ) == _owner_rank(environ)):
        _be_child(environ, flag_split)
    elif is_worker:
        if flag_split.flags and not (is_alias or is_explicit) and _is_named_by_importers():
            flag_split = FlagSplit((), words, flag_split.flags + flag_split.lookalikes)
        _be_worker(environ, flag_split, is_owner=owner == "self", is_launched=is_launched)


def is_off(environ: Mapping[str, str]) -> bool:
    """True if the user has disabled Forerun."""
    return environ.get(OFF, "0") not in ("", "0")


def _be_worker(
    environ: MutableMapping[str, str], flag_split: FlagSplit, *, is_owner: bool, is_launched: bool
) -> None:
    flags = flag_split.flags or _taken(environ)
    note = ""
    if flag_split.flags:
        sys.argv[1:] = flag_split.rest
        if not is_owner:
            note = f"taken from the arguments: {' '.join(flags)} ({OFF}=1 switches this off)"
    is_calibrating = bool(flags) or environ.get("FORERUN_CALIBRATE") == "1"
    if flag_split.lookalikes and not is_calibrating:
        print_note(_lookalike_note(flag_split))
    if not is_calibrating and not (is_launched and environ.get("FORERUN_DEVICE") == "cpu"):
        return
    if note and is_launched:
        print_note(note)
        note = ""
    start = process_start_ticks(os.getpid())
    environ[OWNER] = f"{os.getpid()}:{start}:{_local_rank(environ)}"
    if flags:
        environ[TAKEN] = _BETWEEN.join(flags)
    _find_package()
    from forerun.launch.autoload import begin

    begin(flags, is_calibrating=is_calibrating, note=note)


def _be_child(environ: MutableMapping[str, str], flag_split: FlagSplit) -> None:
    """Set up a worker's child: remove inherited flags and install the same stand-in device."""
    taken = _taken(environ)
    if flag_split.flags and all(flag in taken for flag in flag_split.flags):
        sys.argv[1:] = flag_split.rest
    if environ.get("FORERUN_DEVICE") == "cpu":
        _find_package()
        from forerun.recipes.stand_in_cuda.install import install

        install()


def _taken(environ: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(flag for flag in environ.get(TAKEN, "").split(_BETWEEN) if flag)


def _release(environ: MutableMapping[str, str]) -> None:
    """Let the workers of this launcher own their sessions, even if a worker started the launcher.

    An owner without a torchelastic agent above it may itself be an unknown launcher; the flags it
    took are then left to the workers below it.
    """
    environ.pop(OWNER, None)
    if "TORCHELASTIC_RUN_ID" in environ:
        environ.pop(TAKEN, None)


def _owner(environ: Mapping[str, str]) -> str:
    """Return the session's owner: ``self`` (also from before an exec), ``another`` live process, or
    empty for none."""
    pid, start, *_ = f"{environ.get(OWNER, '')}:".split(":")
    if not pid.isdecimal() or len(pid) > 10 or process_start_ticks(int(pid)) != start:
        return ""
    return "self" if int(pid) == os.getpid() else "another"


def _owner_rank(environ: Mapping[str, str]) -> str:
    return environ.get(OWNER, "").rpartition(":")[2]


def _local_rank(environ: Mapping[str, str]) -> str:
    return next((environ[name] for name in LOCAL_RANKS if name in environ), "")


def process_start_ticks(pid: int) -> str:
    """Return the start time of a process, in ticks since boot; empty if unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""


def is_launcher() -> bool:
    """True if this program is a launcher, judged by the command line of the interpreter."""
    module, script = program(list(getattr(sys, "orig_argv", ()))[1:])
    if module in PROGRAMS or os.path.basename(script).removesuffix(".exe") in PROGRAMS:
        return True
    path = script.removesuffix(".py").replace(os.sep, ".")
    is_named = any(
        f"{module}.".startswith(f"{one}.") or path.endswith(f".{one}") for one in MODULES
    )
    return is_named or (script.endswith(".py") and ".deepspeed.launcher." in path)


def _is_training_program() -> bool:
    """True for a script or module that may train: no code given by ``-c``, no test runner."""
    module, script = program(list(getattr(sys, "orig_argv", ()))[1:])
    names = {module.partition(".")[0], os.path.basename(script).removesuffix(".py")}
    return bool(module or script) and names.isdisjoint(TOOLS)


def _is_named_by_importers() -> bool:
    """True if the code that is importing torch has an option ``--calibrate`` of its own; one that
    names a longer flag of ours, as a program that launches itself, means ours."""
    frame: FrameType | None = sys._getframe()
    is_named = False
    while frame := frame.f_back if frame else None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("torch", "importlib", __name__):
            if _names_ours(frame.f_code):
                return False
            is_named = is_named or names_flag(frame.f_code)
    return is_named


def _names_ours(code: CodeType) -> bool:
    ours = tuple(f"{FLAGS[1]}-{name}" for name in OPTIONS)
    return any(
        _names_ours(one) if isinstance(one, CodeType) else str(one).startswith(ours)
        for const in code.co_consts
        for one in (const if isinstance(const, tuple) else (const,))
    )


def names_flag(code: CodeType) -> bool:
    """True if code has a name or a text such as ``calibrate`` or ``--calibrate-momentum``.

    So an option is written, for argparse and its kin, or as a field, parameter or attribute.
    """
    name = FLAGS[1].lstrip("-")
    if name in (*code.co_names, *code.co_varnames):
        return True
    texts = (one.lstrip("-") for one in code.co_consts if isinstance(one, str))
    nested = (one for one in code.co_consts if isinstance(one, CodeType))
    return any(
        text.startswith(name) and text.replace("-", "_").isidentifier() for text in texts
    ) or any(map(names_flag, nested))


def program(words: Sequence[str]) -> tuple[str, str]:
    """Return the module (after ``-m``) and the script of a Python command line; one is empty."""
    rest = iter(words)
    for word in rest:
        if not word.startswith("-") or word == "-":
            return "", word
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(rest, "")
            continue
        # Switch letters can be combined; the first that takes a value ends the group.
        place = next((n for n, letter in enumerate(word) if letter in "mcWX"), 0)
        value = (word[place + 1 :] or next(rest, "")) if place else ""
        if word[place] in "mc":
            return (value if word[place] == "m" else ""), ""
    return "", ""


def _find_package() -> None:
    """Raise ``ImportError`` with a remedy if ``forerun`` is missing or is not this package."""
    from importlib.util import find_spec

    module = sys.modules.get("forerun")
    spec = getattr(module, "__spec__", None) if module else find_spec("forerun")
    if spec is None and module is None:
        raise ImportError(
            f"no package forerun beside {__file__}; was its clone moved or deleted? "
            "pip install it again, or pip uninstall forerun"
        )
    places = list(getattr(spec, "submodule_search_locations", None) or ())
    if not any(os.path.isfile(os.path.join(place, "launch", "autoload.py")) for place in places):
        where = getattr(spec, "origin", None) or "".join(places[:1]) or repr(module)
        raise ImportError(f"{where} hides the package forerun; rename it")


def _lookalike_note(flag_split: FlagSplit) -> str:
    names = " ".join(word.partition("=")[0] for word in flag_split.lookalikes)
    return (
        f"left to the program: {names}; to calibrate, write --forerun and --forerun-...= in their "
        f"place; to silence this line, set {OFF}=1"
    )


def print_note(text: str) -> None:
    """Print one line, from rank 0 only; to standard error without torchrun's variables, since
    another program's output may be read there."""
    environ = os.environ
    ranks = RANKS[:1] if "RANK" in environ else RANKS
    if all(environ.get(name, "0") == "0" for name in ranks):
        with suppress(Exception):  # the reader may be gone, or there is no stdout
            text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
            file = sys.stdout if "RANK" in environ else sys.stderr
            print(f"[forerun] {text}", file=file, flush=True)
