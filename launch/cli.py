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
    _add_validate(verbs)
    _add_import(verbs)
    doctor = verbs.add_parser("doctor", help="what is installed here and what would be attached")
    doctor.add_argument("--json", action="store_true", help="one JSON value on standard output")
    return parser


def _add_validate(verbs: argparse._SubParsersAction) -> None:
    validate = verbs.add_parser(
        "validate",
        help="how right the models are on tables of measurements",
        description="Fits on one part of each table and scores on the rest, by several protocols. "
        "At most 2,000 samples of an operator train and 2,000 are scored for each seed, drawn by "
        "the seed. Columns: recipes/published/FORMAT.md.",
        allow_abbrev=False,
    )
    validate.add_argument("what", choices=("operators", "collectives"))
    validate.add_argument("files", type=Path, nargs="+", metavar="FILE", help=".csv[.gz], .parquet")
    validate.add_argument("--json", action="store_true", help="one JSON value on standard output")
    validate.add_argument(
        "--protocol", action="append", metavar="NAME", help="only this one (may be repeated)"
    )
    validate.add_argument(
        "--seeds", type=int, default=5, metavar="N", help="random draws to pool (default 5)"
    )


def _add_import(verbs: argparse._SubParsersAction) -> None:
    importer = verbs.add_parser(
        "import",
        help="measurements of other tools into tables in our own format",
        description="kineto: traces of PyTorch's profiler recorded with shapes. nccl-tests: logs. "
        "paper: tables of estimate-train-time, under their own names.",
        allow_abbrev=False,
    )
    importer.add_argument("source", choices=("kineto", "nccl-tests", "paper"))
    importer.add_argument("files", type=Path, nargs="+", metavar="FILE")
    importer.add_argument("--out", type=Path, required=True, metavar="FILE.csv|.parquet")
    importer.add_argument("--json", action="store_true", help="one JSON value on standard output")
    importer.add_argument("--fabric", metavar="NAME", help="what to call the cluster")
    importer.add_argument(
        "--ranks-per-node", type=int, default=8, metavar="N", help="for kineto (default 8)"
    )


def _command(verb: str) -> Callable[[argparse.Namespace], int]:
    """The verb's function, imported only now so that help stays quick."""
    if verb == "doctor":
        from .doctor_command import doctor

        return doctor
    if verb == "validate":
        from .validate_command import validate

        return validate
    if verb == "import":
        from .import_command import import_files

        return import_files
    from . import answer_commands

    return {
        "report": answer_commands.report,
        "predict": answer_commands.predict,
        "plan": answer_commands.plan,
    }[verb]


def _fail(err: Exception, code: ExitCode) -> int:
    print(f"forerun: {err}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
