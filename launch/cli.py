"""Command line: one verb per question; errors become exit codes.

Exit codes: 0 answer, 1 answer and a threshold crossed, 2 usage or configuration, 3 not enough data;
``run``: the code of its command, or 93 if it was stopped on advice and must not be requeued.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from typing import Any

from .. import __version__
from ..calib.errors import CalibrationError, ConfigError, ForerunError, RecordError
from ..calib.shell import printable, printable_lines
from ..calib.workload.argument_values import shown
from ..hooks.process.interpreter import missing_packages_message
from ..leaves import has_leaf
from .verbs.arguments import ExitCode as ExitCode
from .verbs.arguments import VerbParser, declare, near, remedy, untaken_option_message
from .verbs.run_arguments import with_directory_placeholder
from .views.progress import waiting

_QUESTION_OF = {
    "report": "when a calibrated run ends, and where its step time goes",
    "predict": "step time of another layout: --tp 4 --mbs 2, or Megatron's own options",
    "plan": "the best layouts on a number of GPUs, of the same kind or another",
    "import": "convert measurements of other tools into Forerun's tables",
    "probe": "measure a new machine without training, alone or under torchrun",
    "status": "where a live or finished run is now",
    "diff": "which of two runs is slower, by how much, and where the time went",
    "explain": "where the step time of a layout goes, and why it is faster than another",
    "normal": "whether a run is as fast as published runs, and what differs",
    "run": "start a training command and set the exit code that the scheduler sees",
    "doctor": "what is installed and would be attached; of a launch: what wastes time",
}
"""Question that each verb answers; the ``verbs`` module of that name defines its arguments."""
_MODULES = {verb: f".verbs.{verb}" for verb in _QUESTION_OF} | {"import": ".verbs.import_tables"}
VERBS = {
    verb: text for verb, text in _QUESTION_OF.items() if has_leaf(_MODULES[verb], __package__ or "")
}
"""Question that each verb of this installation answers."""
_BARE = frozenset({"doctor", "run", "status"})
"""Verbs that need only the standard library."""
_CACHED = frozenset({"plan", "predict", "explain", "normal", "report"})
"""Verbs that answer from a cached fit; missing packages are reported only if there is none."""
_SLOW = _CACHED | {"diff", "import", "probe"}
"""Verbs that show a progress indicator."""
_FIRST = ("--help", "-h", "--version")
"""Options accepted in place of a verb."""
_COLOUR = r"\x1b\[[0-9;]*m"
_NUM_ALLOCATED = 100_000
"""Threshold of the garbage collector, in new objects.  Imported modules live until exit: collecting
over them repeatedly, and once more at exit, takes a tenth of a quick answer's time."""
_QUESTIONS = (
    ("when it ends, and where a step goes", "report DIR"),
    ("where the run is now", "status DIR"),
    ("the same as it changes, until the end", "status DIR --watch"),
    ("how long a step of another layout takes", "predict DIR --tp 4 --mbs 2"),
    ("the best layouts, here or on other GPUs", "plan DIR --gpus 8..1024"),
    ("the launch command of one of them", "plan DIR --show 1"),
    ("step time before any run", "predict --device H100 -- ..."),
    ("why one layout is faster than another", "explain DIR A B"),
    ("whether that rate is normal", "normal DIR"),
    ("whether the forecasts came true", "report DIR --full"),
    ("which of two runs is slower, and why", "diff DIR_A DIR_B"),
    ("how fast a new machine is", "probe --out DIR"),
    ("the same of other tools' logs and traces", "import KIND FILE --out DIR"),
    ("a start whose exit code is the run's", "run -- torchrun ..."),
    ("what is installed and would be attached", "doctor"),
    ("what a launch wastes", "doctor DIR -- torchrun ..."),
)


def main(argv: Sequence[str] | None = None, *, clock: Callable[[], float] = time.time) -> int:
    """Run one verb and return the exit code; ``clock`` returns the time of the answer, Unix s."""
    words, command = _split_command(sys.argv[1:] if argv is None else argv)
    words = with_directory_placeholder(words, command)
    if (code := _without_verb(words)) is not None:
        return code
    parser = build_parser(words)
    args, rest = parser.parse_known_args(words)
    if command and not hasattr(args, "config") and not hasattr(args, "takes_command"):
        parser.error(f"{args.verb} takes no command after --; leave it out")
    if rest and not getattr(args, "takes_options", False):
        return _fail(untaken_option_message(verb_parsers(), args.verb, rest), ExitCode.USAGE)
    args.options, args.command = [*(getattr(args, "layout_words", None) or ()), *rest], command
    args.clock = clock
    if argv is None:  # called as the program, so the process is ours
        gc.set_threshold(_NUM_ALLOCATED)
        atexit.register(gc.freeze)
    try:
        if args.verb not in _BARE | _CACHED and (text := missing_packages_message(args.verb)):
            raise ConfigError(text)
        out = redirect_stdout(_PrintableStream(sys.stdout)) if sys.stdout else nullcontext()
        with out, waiting(f"forerun {args.verb}") if args.verb in _SLOW else nullcontext():
            code = int(_module(args.verb).run(args))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except ImportError:
        if text := missing_packages_message(args.verb):
            return _fail(text, ExitCode.USAGE)
        raise
    except ForerunError as err:
        is_lacking = isinstance(err, (RecordError, CalibrationError))
        return _fail(err, ExitCode.NO_DATA if is_lacking else ExitCode.USAGE)
    except BrokenPipeError:
        _drop_output()
        return ExitCode.ANSWER
    except OSError as err:
        code = _fail(_of_system(err), ExitCode.USAGE)
        _drop_output()
        return code


class _PrintableStream:
    """Standard output without control characters, since answers hold text of others; on a terminal,
    with colours."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        colours = _COLOUR if self.stream.isatty() else "(?!)"
        pieces = re.split(f"({colours})", text)
        pieces[::2] = map(printable_lines, pieces[::2])
        return self.stream.write("".join(pieces))

    def flush(self) -> None:
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of the verb that ``words`` begin with, or of all verbs if there is none.

    ``predict`` accepts Megatron's options under their own names.
    """
    parser = VerbParser(
        prog="forerun",
        description="When does the run end, which layout would be faster, should it stop now?",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"forerun {__version__}")
    first = words[0] if words else ""
    if first == "--version":
        return parser
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", prog=parser.prog)
    for verb in (first,) if first in VERBS else VERBS:
        sub = verbs.add_parser(verb, help=VERBS[verb], allow_abbrev=False)
        if first not in _FIRST:
            _module(verb).add_arguments(sub)
        if "--json" not in sub._option_string_actions:
            declare(sub, "--json  print one JSON value on standard output")
    return parser


def verb_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each verb, by name."""
    actions = build_parser()._actions
    return next(dict(a.choices) for a in actions if isinstance(a, argparse._SubParsersAction))


def _split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return our arguments, and the command of another run after the first ``--``."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def _without_verb(words: Sequence[str]) -> int | None:
    """Print the list of questions if there are no words, or an error with the nearest verb if the
    first is not a verb; return the exit code, or None if it is a verb."""
    if not words:
        print(_questions())
        return ExitCode.ANSWER
    if words[0] in (*VERBS, *_FIRST):
        return None
    hint = remedy(words[0], VERBS)
    if words[0][:1] == "-":
        hint = near(words[0], _FIRST, cutoff=0.7)
        hint = hint or "the verb comes first: forerun report DIR --json"
    return _fail(f"{shown(words[0])} is not a verb; {hint}", ExitCode.USAGE)


def _questions() -> str:
    asked = [one for one in _QUESTIONS if one[1].partition(" ")[0] in VERBS]
    wide = max(len(question) for question, _ in asked)
    rows = [f"  {question:{wide}}  forerun {words}" for question, words in asked]
    end = "DIR is what --calibrate-dir named; forerun VERB --help lists the options."
    return "\n".join(["Questions to a calibrated run:", "", *rows, "", end])


def _module(verb: str) -> Any:
    """Import and return the module of a verb, only now so that help stays quick."""
    return importlib.import_module(_MODULES[verb], __package__)


def _fail(err: Exception | str, code: ExitCode) -> int:
    with suppress(OSError, ValueError):  # without stderr, the exit code remains
        if sys.stderr is not None:
            print(f"forerun: {printable(str(err))}", file=sys.stderr, flush=True)
    return code


def _of_system(err: OSError) -> str:
    """Return path and reason of a system error: disk full, permission denied, output closed."""
    what = err.strerror or type(err).__name__
    what += "; give another name" * isinstance(err, FileExistsError)
    return f"{err.filename}: {what}" if err.filename is not None else f"cannot write: {what}"


def _drop_output() -> None:
    """Redirect stdout to the null device: a failing flush at exit would change the exit code."""
    with suppress(OSError, ValueError):
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
