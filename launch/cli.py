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
from contextlib import suppress
from pathlib import Path

from .. import __version__
from ..calib.arguments.short_names import LAYOUT_NAMES
from ..calib.errors import CalibrationError, ConfigError, ForerunError, RecordError
from ..calib.workload.argument_values import shown
from ..hooks.process.interpreter import needs
from .commands.outcome import ExitCode as ExitCode
from .options.explain_options import add_explain_options
from .options.plan_options import SCHEMA_FILE as ANSWERS
from .options.plan_options import (
    add_layout_options,
    add_plan_options,
    describe_layout_names,
)
from .options.schema_option import add_file_schema_option, add_schema_option
from .options.show_options import add_show
from .wrapper.run_options import add_run

_VERBS = {
    "report": "commands.report_command:report",
    "predict": "commands.answer_commands:predict",
    "plan": "commands.plan_command:plan",
    "validate": "commands.validate_command:validate",
    "import": "commands.import_command:import_files",
    "probe": "commands.probe_command:probe",
    "compare": "commands.compare_command:compare",
    "explain": "commands.explain_command:explain",
    "run": "wrapper.run_command:run",
    "doctor": "commands.doctor:doctor",
}
_BARE = frozenset({"doctor", "run"})
"""Verbs of the standard library."""
_KEPT = frozenset({"plan", "predict", "explain"})
"""Verbs that answer from a kept fit, which holds for the packages that it was made with: those are
looked at where there is none."""
_NUM_ALLOCATED = 100_000
"""New objects between two looks for garbage.  What is imported stays to the end: looking through it
again and again, and once more at exit, takes a tenth of a quick answer."""


_QUESTIONS = (
    ("when it ends, and where a step goes", "report DIR"),
    ("how long a step of another layout takes", "predict DIR --tp 4 --mbs 2"),
    ("the best layouts, here or on other GPUs", "plan DIR --gpus 8..1024"),
    ("the launch command of one of them", "plan DIR --show 1"),
    ("why one layout is faster than another", "explain DIR A B"),
    ("whether the forecasts came true", "compare DIR"),
    ("what a new machine is worth, untrained", "probe --out DIR"),
    ("what is installed, and would be attached", "doctor"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code."""
    parser = build_parser()
    words, command = _split_command(sys.argv[1:] if argv is None else argv)
    if (code := _without_verb(words)) is not None:
        return code
    args, rest = parser.parse_known_args(words)
    if command and not hasattr(args, "config") and not hasattr(args, "takes_command"):
        parser.error(f"{args.verb} takes no command behind --")
    if rest and not getattr(args, "takes_options", False):
        return _fail(_not_taken(parser, args.verb, rest), ExitCode.USAGE)
    args.options, args.command = [*(getattr(args, "layout_words", None) or ()), *rest], command
    if argv is None:
        _keep_what_is_imported()
    try:
        _check_packages(args.verb)
        code = int(_command(args.verb)(args))
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


def build_parser() -> argparse.ArgumentParser:
    """The parser; options of Megatron pass through ``predict`` by their own names."""
    parser = argparse.ArgumentParser(
        prog="forerun",
        description="When does the run end, which layout would be faster, should it stop now?",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"forerun {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", prog=parser.prog)
    _add_answers(verbs)
    _add_validate(verbs)
    _add_import(verbs)
    _add_probe(verbs)
    _add_compare(verbs)
    _add_explain(verbs)
    verbs.add_parser("doctor", help="what is installed here and what would be attached")
    for verb in verbs.choices.values():
        verb.add_argument("--json", action="store_true", help="one JSON value on standard output")
    add_run(verbs)
    return parser


def _split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own words, and the command of another run behind the first ``--``."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def _add_answers(verbs: argparse._SubParsersAction) -> None:
    for verb, text in (
        ("report", "what a calibrated run says about itself"),
        ("predict", "step time of another layout: --tp 4 --mbs 2, or Megatron's own options"),
        ("plan", "the best layouts on a number of GPUs, of this kind or another"),
    ):
        sub = verbs.add_parser(verb, help=text, allow_abbrev=False)
        sub.add_argument("directory", type=Path, help="what --calibrate-dir was")
        sub.add_argument("--run-id", help="which run, where the directory holds several")
        sub.set_defaults(takes_options=verb == "predict")
    add_file_schema_option(verbs.choices["report"])
    for verb in ("predict", "plan"):
        _add_evidence(verbs.choices[verb])
        add_schema_option(verbs.choices[verb], ANSWERS)
    add_plan_options(verbs.choices["plan"])
    add_show(verbs.choices["plan"])
    describe_layout_names(verbs.choices["plan"])
    add_layout_options(verbs.choices["predict"])
    verbs.choices["predict"].add_argument(
        "--fail-over",
        type=float,
        metavar="SECONDS",
        help="exit 1 when the step is slower than this",
    )


def _add_evidence(sub: argparse.ArgumentParser) -> None:
    """What else is asked of, and what else counts, than the newest run of a directory."""
    add = sub.add_argument
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="another run over this calibration: Megatron's arguments as YAML or JSON, a "
        "Hugging Face config.json, a checkpoint; or give its whole command behind --",
    )
    add(
        "--also",
        type=Path,
        action="append",
        metavar="DIR",
        help="another directory whose measured steps count too; may be given again",
    )
    add("--machine", metavar="NAME", help="of imported steps: which machine")
    _add_cluster(add)
    over = sub.add_mutually_exclusive_group().add_argument
    over(
        "--like",
        type=Path,
        metavar="DIR",
        help="a run of another machine, maybe of another device: its operators are carried "
        "over, and the samples or probes of this directory correct them",
    )
    over(
        "--device",
        metavar="NAME",
        help="another device that nothing was measured on, as H100 or by its driver's name: "
        "operators are carried over by data sheets; plan takes several with commas",
    )


def _add_cluster(add: Callable[..., object], of: str = "") -> None:
    add(
        "--cluster",
        type=Path,
        metavar="FILE",
        help=f"{of}JSON of what joins the GPUs (joint, num_gpus, num_cards, domain, "
        "node_bytes_per_s, card_bytes_per_s): docs/cluster.md",
    )


def _add_validate(verbs: argparse._SubParsersAction) -> None:
    add = verbs.add_parser(
        "validate",
        help="how right the models are on tables of measurements",
        description="Fits on one part of each table and scores on the rest, by several protocols. "
        "At most 2,000 samples of an operator train and 2,000 are scored for each seed, drawn by "
        "the seed. steps: whole steps of layouts. design: which of them would teach most. "
        "Columns: recipes/published/FORMAT.md.",
        allow_abbrev=False,
    ).add_argument
    add("what", choices=("operators", "collectives", "steps", "design"))
    add("files", type=Path, nargs="+", metavar="FILE", help=".csv[.gz], .parquet")
    add("--protocol", action="append", metavar="NAME", help="only this one (may be repeated)")
    add("--seeds", type=int, default=5, metavar="N", help="random draws to pool (default 5)")
    add(
        "--calibrate-on",
        type=int,
        metavar="K",
        help="steps: rows that calibrate, the rest is scored",
    )
    add(
        "--draws", type=int, default=20, metavar="N", help="steps: draws of these rows (default 20)"
    )
    add(
        "--operators",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="steps: tables of operators and collectives of the same devices",
    )
    add("--rows", type=int, default=10, metavar="K", help="design: layouts to name (default 10)")
    _add_cluster(add, "collectives, steps: ")


def _add_import(verbs: argparse._SubParsersAction) -> None:
    add = verbs.add_parser(
        "import",
        help="measurements of other tools into tables in our own format",
        description="kineto: traces of PyTorch's profiler recorded with shapes. nccl-tests: logs. "
        "steps: step times of layouts, operators or collectives in our own format, into a "
        "directory that answers predict and plan. Columns: recipes/published/FORMAT.md.",
        allow_abbrev=False,
    ).add_argument
    add("source", choices=("kineto", "nccl-tests", "steps"))
    add("files", type=Path, nargs="+", metavar="FILE")
    add("--out", type=Path, required=True, metavar="FILE|DIR")
    add("--fabric", metavar="NAME", help="what to call the cluster")
    add("--ranks-per-node", type=int, default=8, metavar="N", help="for kineto (default 8)")
    add(
        "--kernels",
        type=Path,
        metavar="FILE",
        help="kineto: all kernels by phase, operator and transfer, shapes or not",
    )


def _add_probe(verbs: argparse._SubParsersAction) -> None:
    add = verbs.add_parser(
        "probe",
        help="measure a new machine without training, alone or under torchrun",
        description="Products, memory and the operators of a layout; under torchrun collectives as "
        "well: torchrun --nproc-per-node N -m forerun probe --out DIR. The layout is that of "
        "--config or of the command behind --, else a GPT that suits the device.",
        allow_abbrev=False,
    ).add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="for the records")
    add("--config", type=Path, metavar="FILE", help="as for predict")
    add("--seconds", type=float, default=60.0, help="for all of it (default 60)")
    add("--operators", action="store_true", help="these alone")
    add("--collectives", action="store_true", help="these alone")


def _add_explain(verbs: argparse._SubParsersAction) -> None:
    sub = verbs.add_parser(
        "explain",
        help="why a layout takes what it takes, and why it is faster than another",
        description="A layout is named as a plan prints it (TP4 PP2 DP2 mbs2), in short names over "
        "the running layout (tp4 pp2), by its row in the plan (3), or as running.",
        allow_abbrev=False,
    )
    add_explain_options(sub)
    _add_evidence(sub)


def _add_compare(verbs: argparse._SubParsersAction) -> None:
    add = verbs.add_parser(
        "compare",
        help="every forecast that was made, against what happened",
        description="For each run of these directories that has come to its end: error of the "
        "forecast finish over time, how often its intervals and those of single steps held, and "
        "from when on it was right.",
        allow_abbrev=False,
    ).add_argument
    add("directories", type=Path, nargs="+", metavar="DIR")
    add(
        "--fail-over",
        type=float,
        metavar="FRAC",
        help="exit 1 when the first forecast of a run was off by more than this share of it",
    )


def _not_taken(parser: argparse.ArgumentParser, verb: str, words: Sequence[str]) -> str:
    """What a verb does not take, and what it does that is near."""
    subs = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    taken = [name for a in subs.choices[verb]._actions for name in a.option_strings]
    name = words[0].partition("=")[0]
    axis = name.removeprefix("--")
    if verb == "plan" and axis in {one for n in LAYOUT_NAMES for one in (n.name, *n.others)}:
        return f"plan takes no {name}; write --keep {axis}=VALUE for such layouts alone"
    import difflib  # no answer needs it

    near = difflib.get_close_matches(name, taken, n=2, cutoff=0.6) if name[:1] == "-" else []
    remedy = f"did you mean {' or '.join(near)}?" if near else f"see forerun {verb} --help"
    return f"{verb} takes no {' '.join(words)}; {remedy}"


def _without_verb(words: Sequence[str]) -> int | None:
    """What can be asked, for who asks nothing; what is near to a word that is no verb; else
    None."""
    if not words:
        print(_questions())
        return ExitCode.ANSWER
    if words[0] in _VERBS or words[0][:1] == "-":
        return None
    import difflib  # no answer needs it

    near = difflib.get_close_matches(words[0], _VERBS, n=2, cutoff=0.5)
    remedy = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(_VERBS)}"
    return _fail(f"{shown(words[0])} is no verb; {remedy}", ExitCode.USAGE)


def _questions() -> str:
    wide = max(len(question) for question, _ in _QUESTIONS)
    rows = [f"  {question:{wide}}  forerun {words}" for question, words in _QUESTIONS]
    end = "DIR is what --calibrate-dir was; forerun VERB --help has the options."
    return "\n".join(["What can be asked of a calibrated run:", "", *rows, "", end])


def _check_packages(verb: str) -> None:
    """``ConfigError`` where the verb needs packages that are not here."""
    if verb not in _BARE | _KEPT and (text := needs(verb)):
        raise ConfigError(text)


def _command(verb: str) -> Callable[[argparse.Namespace], int]:
    """The verb's function, imported only now so that help stays quick."""
    module, _, name = _VERBS[verb].partition(":")
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
