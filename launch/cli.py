"""The command line: one verb per question, errors to exit codes.

Exit codes: 0 answer, 1 answer and a threshold crossed, 2 usage or configuration, 3 not enough data;
``run``: the code of its command, or 93 where it was stopped on advice and is not to be requeued.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from .. import __version__
from ..calib.errors import CalibrationError, ConfigError, ForerunError, RecordError
from ..calib.workload import shown
from ..hooks.process import needs
from .commands.outcome import ExitCode as ExitCode
from .options.verb_parser import VerbParser, near, not_taken, remedy
from .options.without_directory import with_place
from .report.progress import waiting

_VERBS = {
    "report": "commands.report_command:report",
    "predict": "commands.answer_commands:predict",
    "plan": "commands.plan_command:plan",
    "validate": "commands.validate_command:validate",
    "import": "commands.import_command:import_files",
    "probe": "commands.probe_command:probe",
    "status": "live.status_command:status",
    "watch": "live.watch_command:watch",
    "compare": "commands.compare_command:compare",
    "diff": "commands.diff_command:diff",
    "explain": "commands.explain_command:explain",
    "normal": "commands.answer_commands:normal",
    "run": "wrapper.run_command:run",
    "doctor": "commands.doctor:doctor",
}
_OPTIONS = {
    "report": "options.answer_options:add_report",
    "predict": "options.answer_options:add_predict",
    "plan": "options.answer_options:add_plan",
    "validate": "options.measurement_options:add_validate",
    "import": "options.measurement_options:add_import",
    "probe": "options.measurement_options:add_probe",
    "status": "options.progress_options:add_status",
    "watch": "options.progress_options:add_watch",
    "compare": "options.progress_options:add_compare",
    "diff": "options.diff_options:add_diff",
    "explain": "options.answer_options:add_explain",
    "normal": "options.answer_options:add_normal",
    "run": "wrapper.run_options:add_run",
    "doctor": "options.measurement_options:add_doctor",
}
"""What adds the parser of a verb."""
_OF_A_LAUNCH = "commands.lint_command:lint_launch"
"""``doctor`` where a launch is given."""
_BARE = frozenset({"doctor", "run", "status", "watch"})
"""Verbs of the standard library."""
_CACHED = frozenset({"plan", "predict", "explain", "normal", "report", "compare"})
"""Verbs that answer from a cached fit, which holds for the packages that it was made with: those
are looked at where there is none."""
_SLOW = _CACHED - {"compare"} | {"diff", "validate", "import", "probe"}
"""Verbs that may be waited for."""
_FIRST = ("--help", "-h", "--version")
"""What may stand in place of a verb."""
_NUM_ALLOCATED = 100_000
"""New objects between two looks for garbage.  What is imported stays to the end: looking through it
again and again, and once more at exit, takes a tenth of a quick answer."""


_QUESTIONS = (
    ("when it ends, and where a step goes", "report DIR"),
    ("where the run is now, until it ends", "watch DIR"),
    ("how long a step of another layout takes", "predict DIR --tp 4 --mbs 2"),
    ("the best layouts, here or on other GPUs", "plan DIR --gpus 8..1024"),
    ("the launch command of one of them", "plan DIR --show 1"),
    ("the same before any run", "predict --device H100 -- ..."),
    ("why one layout is faster than another", "explain DIR A B"),
    ("whether that rate is normal", "normal DIR"),
    ("whether the forecasts came true", "compare DIR"),
    ("which of two runs is slower, and why", "diff DIR_A DIR_B"),
    ("how fast a new machine is", "probe --out DIR"),
    ("what is installed and would be attached", "doctor"),
    ("what a launch wastes", "doctor DIR -- torchrun ..."),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code."""
    words, command = _split_command(sys.argv[1:] if argv is None else argv)
    words = with_place(words)
    if (code := _without_verb(words)) is not None:
        return code
    parser = build_parser(words)
    args, rest = parser.parse_known_args(words)
    if command and not hasattr(args, "config") and not hasattr(args, "takes_command"):
        parser.error(f"{args.verb} takes no command after --; leave it out")
    if rest and not getattr(args, "takes_options", False):
        return _fail(not_taken(build_parser(), args.verb, rest), ExitCode.USAGE)
    args.options, args.command = [*(getattr(args, "layout_words", None) or ()), *rest], command
    if argv is None:
        _keep_what_is_imported()
    try:
        _check_packages(args.verb)
        with waiting(f"forerun {args.verb}") if args.verb in _SLOW else nullcontext():
            code = int(_named(_place_of(args))(args))
        _flush()
        return code
    except ImportError:
        if text := needs(args.verb):
            return _fail(text, ExitCode.USAGE)
        raise
    except ConfigError as err:
        return _fail(err, ExitCode.USAGE)
    except (RecordError, CalibrationError) as err:
        return _fail(err, ExitCode.NO_DATA)
    except ForerunError as err:
        return _fail(err, ExitCode.USAGE)
    except BrokenPipeError:
        _drop_output()
        return ExitCode.ANSWER
    except OSError as err:
        code = _fail(_of_system(err), ExitCode.USAGE)
        _drop_output()
        return code


def _keep_what_is_imported() -> None:
    """In a process of our own, what is imported stays to the end."""
    gc.set_threshold(_NUM_ALLOCATED)
    atexit.register(gc.freeze)


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of the verb that ``words`` begin with, or of all verbs where they begin with none.

    Options of Megatron pass through ``predict`` by their own names.
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
    for verb in (first,) if first in _OPTIONS else _OPTIONS:
        _named(_OPTIONS[verb])(verbs)
    for sub in verbs.choices.values():
        if "--json" not in sub._option_string_actions:
            sub.add_argument(
                "--json", action="store_true", help="print one JSON value on standard output"
            )
    return parser


def _split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own words, and the command of another run behind the first ``--``."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def _without_verb(words: Sequence[str]) -> int | None:
    """What can be asked, for who asks nothing; what is near to a word that is no verb; else
    None."""
    if not words:
        print(_questions())
        return ExitCode.ANSWER
    if words[0] in (*_VERBS, *_FIRST):
        return None
    if words[0][:1] == "-":
        said = (
            near(words[0], _FIRST, cutoff=0.7) or "the verb comes first: forerun report DIR --json"
        )
        return _fail(f"{shown(words[0])} is not a verb; {said}", ExitCode.USAGE)
    return _fail(f"{shown(words[0])} is not a verb; {remedy(words[0], _VERBS)}", ExitCode.USAGE)


def _questions() -> str:
    wide = max(len(question) for question, _ in _QUESTIONS)
    rows = [f"  {question:{wide}}  forerun {words}" for question, words in _QUESTIONS]
    end = "DIR is what --calibrate-dir named; forerun VERB --help lists the options."
    return "\n".join(["Questions to a calibrated run:", "", *rows, "", end])


def _check_packages(verb: str) -> None:
    """``ConfigError`` where the verb needs packages that are not here."""
    if verb not in _BARE | _CACHED and (text := needs(verb)):
        raise ConfigError(text)


def _place_of(args: argparse.Namespace) -> str:
    if args.verb == "doctor":
        from .options.lint_options import is_of_a_launch  # of use there alone

        return _OF_A_LAUNCH if is_of_a_launch(args) else _VERBS["doctor"]
    return _VERBS[args.verb]


def _named(place: str) -> Callable[..., Any]:
    """The function of a table, imported only now so that help stays quick."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f".{module}", __package__), name)


def _fail(err: Exception | str, code: ExitCode) -> int:
    with suppress(OSError, ValueError):  # where nobody can be told, the code still says it
        if sys.stderr is not None:
            print(f"forerun: {err}", file=sys.stderr, flush=True)
    return code


def _of_system(err: OSError) -> str:
    """A full disk, a file that may not be read, an output that is gone: where, and what."""
    what = err.strerror or type(err).__name__
    return f"{err.filename}: {what}" if err.filename is not None else f"cannot write: {what}"


def _drop_output() -> None:
    """What could not be written is not tried again at exit, which would change the exit code."""
    with suppress(OSError, ValueError):
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
