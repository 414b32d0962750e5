"""The command line: one verb per question, errors to exit codes.

Exit codes: 0 answer, 1 answer and a threshold crossed, 2 usage or configuration, 3 not enough data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path

from ..calib.errors import CalibrationError, ConfigError, ForerunError, RecordError


class ExitCode(IntEnum):
    """What the shell sees."""

    ANSWER = 0
    THRESHOLD = 1
    USAGE = 2
    NO_DATA = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not getattr(args, "takes_options", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.options = rest
    try:
        return int(_command(args.verb)(args))
    except ConfigError as err:
        return _fail(err, ExitCode.USAGE)
    except (RecordError, CalibrationError) as err:
        return _fail(err, ExitCode.NO_DATA)
    except ForerunError as err:
        return _fail(err, ExitCode.USAGE)
    except BrokenPipeError:
        return ExitCode.ANSWER


def build_parser() -> argparse.ArgumentParser:
    """The parser; options of Megatron pass through ``predict`` by their own names."""
    parser = argparse.ArgumentParser(
        prog="forerun",
        description="When does the run end, which layout would be faster, should it stop now?",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in (
        ("report", "what a calibrated run says about itself"),
        ("predict", "step time of another layout, by Megatron's option names"),
        ("plan", "layouts ranked on a number of ranks"),
    ):
        sub = verbs.add_parser(verb, help=text, allow_abbrev=False)
        sub.add_argument("directory", type=Path, help="what --calibrate-dir was")
        sub.add_argument("--run-id", help="which run, where the directory holds several")
        sub.add_argument("--json", action="store_true", help="one JSON value on standard output")
        sub.set_defaults(takes_options=verb == "predict")
    plan = verbs.choices["plan"]
    plan.add_argument("--gpus", type=int, help="number of ranks (default: as the run)")
    plan.add_argument("--top", type=int, default=10, help="rows to show (default 10)")
    plan.add_argument(
        "--memory-gib", type=float, help="memory of one device (default: what the run had)"
    )
    verbs.choices["predict"].add_argument(
        "--fail-over",
        type=float,
        metavar="SECONDS",
        help="exit 1 when the step is slower than this",
    )
    doctor = verbs.add_parser("doctor", help="what is installed here and what would be attached")
    doctor.add_argument("--json", action="store_true", help="one JSON value on standard output")
    return parser


def _command(verb: str) -> Callable[[argparse.Namespace], int]:
    """The verb's function, imported only now so that help stays quick."""
    from . import answer_commands, doctor_command

    return {
        "report": answer_commands.report,
        "predict": answer_commands.predict,
        "plan": answer_commands.plan,
        "doctor": doctor_command.doctor,
    }[verb]


def _fail(err: Exception, code: ExitCode) -> int:
    print(f"forerun: {err}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
