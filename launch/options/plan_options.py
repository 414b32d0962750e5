"""What ``forerun plan`` is asked: options as text, and their meaning."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from inspect import signature
from pathlib import Path
from typing import Any, TypeAlias

from ...calib.arguments import LAYOUT_NAMES, Keep
from ...calib.errors import ConfigError
from ...calib.forecast import read_count
from ...calib.memory import known_device
from ...calib.units import GIB
from ...calib.workload import Batch, RunConfig, at_least_one, at_most, shown, whole

SCHEMA_FILE = Path(__file__).parents[1] / "report" / "answers.schema.json"
"""Of what ``predict`` and ``plan`` print for programs: JSON Schema, draft 2020-12."""
NUM_TOP = 10
"""Rows of a plan, unless others are asked for."""
# Anything above is a slip of units; it also keeps bytes within 64 bits.
_MOST_GIB = 1e9
# A table of more is not read, and each is a search of its own.
_MOST_COUNTS = 32
_MOST_TOKENS = 10**15
_TO = ".."
_PER_GPU = "xgpus"


class Objective(Enum):
    """By what layouts are ordered."""

    TIME = "time"
    """Seconds for the same samples."""
    COST = "cost"
    """Hours of all GPUs for the same samples, times their price where it is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRule:
    """The global batch size for a number of ranks, in samples."""

    samples: int = 0
    """Of all ranks; 0: as the run has."""
    samples_per_rank: int = 0
    """Times the number of ranks."""
    follows_ranks: bool = False
    """As many for each rank as the run has."""

    def size(self, own: RunConfig, num_ranks: int) -> int:
        """Samples of a step on so many ranks; ``ConfigError`` where they are no whole number."""
        here, own_ranks = own.batch.global_batch_size, own.parallelism.num_ranks
        if not self.follows_ranks:
            return self.samples_per_rank * num_ranks or self.samples or here
        if here * num_ranks % own_ranks:
            raise ConfigError(
                "--global-batch-size xGPUS is not a whole number of samples on "
                f"{num_ranks} GPUs (the run has {here} on {own_ranks}); choose other numbers of "
                "GPUs, or give samples"
            )
        return here * num_ranks // own_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """What is asked of a plan."""

    counts: tuple[int, ...]
    """Numbers of ranks; empty: as the run."""
    ranks_per_node: int
    """0: as the run."""
    devices: tuple[str, ...]
    """By the driver's name; empty: the run's own."""
    batch: BatchRule
    seq_length: int
    """Tokens of a sample; 0: as the run."""
    memory_nbytes: int | None
    objective: Objective
    prices: tuple[float, ...]
    """Of an hour of one GPU, for each of the devices; empty: not told."""
    num_tokens: int
    """Tokens of a whole run; 0: not requested."""
    keep: Keep | None
    why: Keep | None
    top: int

    def price(self, place: int) -> float | None:
        """Price of an hour of a GPU of one of the devices, by its place; None: not told."""
        return self.prices[min(place, len(self.prices) - 1)] if self.prices else None

    def asked_of(self, config: RunConfig, num_ranks: int) -> RunConfig:
        """The run with the batch for so many ranks, the samples and the nodes that are asked for.

        Its replicas and its micro-batch shrink to what divides the batch.
        """
        batch, par = self.batch.size(config, num_ranks), config.parallelism
        nodes = self.ranks_per_node or par.ranks_per_node
        dp = math.gcd(par.dp, batch)
        micro = math.gcd(config.batch.micro_batch_size, batch // dp)
        ramp = config.cadence.full_batch_size
        return replace(
            config,
            model=_of_length(config, self.seq_length) if self.seq_length else config.model,
            parallelism=replace(par, dp=dp, ranks_per_node=nodes),
            batch=Batch(micro_batch_size=micro, global_batch_size=batch),
            cadence=replace(config.cadence, full_batch_size=batch) if ramp else config.cadence,
        )


Several: TypeAlias = "str | float | Sequence[str] | Sequence[float] | None"
"""One value, several, or the text of an option; None: not asked."""


def plan_words(args: argparse.Namespace) -> dict[str, Any]:
    """What the options of ``plan`` say, by the names of ``read_question``."""
    return {name: getattr(args, name) for name in signature(read_question).parameters}


def read_question(
    *,
    gpus: Several = None,
    gpus_per_node: int | str | None = None,
    device: Several = None,
    global_batch_size: int | str | None = None,
    seq_length: int | str | None = None,
    memory_gib: float | str | None = None,
    objective: str = Objective.TIME.value,
    price_per_gpu_hour: Several = None,
    tokens: float | str | None = None,
    keep: str | Mapping[str, Any] | None = None,
    why: str | Mapping[str, Any] | None = None,
    top: int | str = NUM_TOP,
) -> PlanQuestion:
    """What is asked, by values or by the texts of options.

    ``ConfigError`` with value, rule and remedy where that has no meaning.
    """
    devices = _devices(_text(device))
    return PlanQuestion(
        counts=read_counts(counts) if (counts := _text(gpus)) else (),
        ranks_per_node=_positive("--gpus-per-node", gpus_per_node),
        devices=devices,
        batch=read_batch(_text(global_batch_size) or ""),
        seq_length=_positive("--seq-length", seq_length),
        memory_nbytes=_memory_nbytes(memory_gib),
        objective=_objective(objective),
        prices=read_prices(_text(price_per_gpu_hour), max(1, len(devices))),
        num_tokens=0 if tokens is None else read_tokens(tokens),
        keep=_keep(keep),
        why=_keep(why),
        top=_positive("--top", top),
    )


def _text(value: Several) -> str | None:
    """A value as an option says it.

    >>> _text([8, 16]), _text("8..64"), _text(2.5), _text(None)
    ('8,16', '8..64', '2.5', None)
    """
    if value is None or isinstance(value, str):
        return value
    return ",".join(map(str, value)) if isinstance(value, Iterable) else str(value)


def _keep(asked: str | Mapping[str, Any] | None) -> Keep | None:
    """What is kept, by its text or by values of names.

    >>> str(_keep({"tp": 8, "pp": (1, 2)}))
    'tp=8,pp=1|2'
    """
    if isinstance(asked, Mapping):
        pairs = ((name, one if _is_list(one) else (one,)) for name, one in asked.items())
        asked = ",".join(f"{name}={'|'.join(map(str, values))}" for name, values in pairs)
    return Keep.parse(asked) if asked else None


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)


def read_counts(text: str) -> tuple[int, ...]:
    """Numbers of GPUs: one, several with commas, or from one to another, doubling.

    ``A..B`` is A times the powers of two up to B, which needs to be none of them.

    >>> read_counts("8..64"), read_counts("64,96,8"), read_counts("6..30")
    ((8, 16, 32, 64), (64, 96, 8), (6, 12, 24))
    """
    found: list[int] = []
    for part in text.split(","):
        first, is_range, last = part.partition(_TO)
        begin = _positive("--gpus", first)
        end = _positive("--gpus", last) if is_range else begin
        if end < begin:
            raise ConfigError(f"--gpus {part} ends below its start; write {end}..{begin}")
        while begin <= end:
            found.append(begin)
            begin *= 2
    counts = tuple(dict.fromkeys(found))
    if len(counts) > _MOST_COUNTS:
        raise ConfigError(
            f"--gpus has {len(counts)} numbers of GPUs; give at most {_MOST_COUNTS} at once"
        )
    return counts


def read_tokens(text: object) -> int:
    """A number of tokens; ``ConfigError`` where it is none.

    >>> read_tokens("1T"), read_tokens("2.3b"), read_tokens("2e12"), read_tokens(300)
    (1000000000000, 2300000000, 2000000000000, 300)
    """
    rule = f"--tokens {shown(text)} is not a number of tokens; give one such as 300B or 1T"
    number = read_count(str(text), rule)
    if not 0 < number < _MOST_TOKENS:
        raise ConfigError(rule)
    return number


def read_batch(text: str) -> BatchRule:
    """The batch of a number, of ``xGPUS`` (as many samples for each GPU as the run has), or of
    ``4xGPUS`` (four for each); the run's own of nothing.

    >>> read_batch("4xGPUS").samples_per_rank, read_batch("xGPUS").follows_ranks
    (4, True)
    >>> read_batch("512")
    BatchRule(samples=512, samples_per_rank=0, follows_ranks=False)
    """
    low = text.strip().lower()
    if not low:
        return BatchRule()
    if not low.endswith(_PER_GPU):
        return BatchRule(samples=_positive("--global-batch-size", text))
    number = low.removesuffix(_PER_GPU)
    if not number:
        return BatchRule(follows_ranks=True)
    return BatchRule(samples_per_rank=_positive("--global-batch-size", number))


def add_plan_options(sub: argparse.ArgumentParser) -> None:
    """Options of ``plan`` alone.  All are read as text, so that errors say value and remedy."""
    add = sub.add_argument
    add(
        "--gpus",
        metavar="N|A..B|N,N",
        help=(
            "numbers of GPUs: one, several separated by commas, or 8..1024 for 8, 16, 32 and so on "
            "up to 1024 (default: as in the run)"
        ),
    )
    add("--gpus-per-node", metavar="N", help="(default: as in the run)")
    add(
        *("--global-batch-size", "--gbs"),
        metavar="N|xGPUS",
        help="samples of a step; xGPUS: as many per GPU as in the run; 4xGPUS: four per GPU",
    )
    add("--seq-length", "--seq", metavar="N", help="tokens of a sample")
    add("--memory-gib", metavar="X", help="memory of one GPU in GiB (default: as in the run)")
    add("--objective", metavar="time|cost", default="time", help="order of the rows (default time)")
    add_tokens(sub)
    add("--keep", metavar="tp=8,pp=1|2", help="only layouts with these values")
    add("--why", metavar="tp=16", help="why such layouts are not at the top")
    add("--top", metavar="K", default=NUM_TOP, help=f"number of rows to show (default {NUM_TOP})")


def add_tokens(sub: argparse.ArgumentParser) -> None:
    """Options on a whole run, of ``predict`` and ``plan``."""
    sub.add_argument(
        "--tokens",
        metavar="N",
        help="days, steps and GPU-hours of a run to so many tokens, as 300B, 1T or 2e12",
    )
    sub.add_argument(
        "--price-per-gpu-hour",
        metavar="X",
        help="price of an hour of one GPU: one, or of plan one for each --device, with commas",
    )


def add_layout_options(sub: argparse.ArgumentParser) -> None:
    """Short names of a layout, kept in ``layout_words`` as they were written."""
    group = sub.add_argument_group(
        "layout", "settings that differ from the run; Megatron's own options work as well"
    )
    for axis in LAYOUT_NAMES:
        group.add_argument(
            *axis.spellings,
            action=_Passed,
            metavar=axis.metavar,
            help=axis.help,
            dest="layout_words",
        )


def describe_layout_names(sub: argparse.ArgumentParser) -> None:
    """The same names in the help of a verb that takes them as ``NAME=VALUE``."""
    names = ", ".join("/".join((axis.name, *axis.others)) for axis in LAYOUT_NAMES)
    sub.add_argument_group("layout", f"NAME of --keep and --why, as in NAME=VALUE|VALUE: {names}")


class _Passed(argparse.Action):
    """Keeps the option and its word in order."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        known = getattr(namespace, self.dest) or ()
        setattr(namespace, self.dest, (*known, f"{option_string}={values}"))


def _positive(option: str, text: object) -> int:
    """A whole number above 0; 0 where nothing is given."""
    if text is None:
        return 0
    number = whole(option.lstrip("-").replace("-", "_"), text)
    at_least_one(option, number)
    at_most(option, number)
    return number


def _real(option: str, text: str, rule: str) -> float:
    try:
        return float(text)
    except ValueError as err:
        raise ConfigError(f"{option} {shown(text)} is not a number; {rule}") from err


def _memory_nbytes(text: object) -> int | None:
    if text is None:
        return None
    rule = "give a number of GiB above 0"
    gib = _real("--memory-gib", str(text), rule)
    if not 0 < gib < _MOST_GIB:
        raise ConfigError(f"--memory-gib {gib:g} is not a size of memory; {rule}")
    return int(gib * GIB)


def _devices(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    return tuple(dict.fromkeys(known_device(name).driver_name for name in text.split(",")))


def _objective(text: str) -> Objective:
    try:
        return Objective(text.lower())
    except ValueError as err:
        raise ConfigError(f"--objective {shown(text)} is not known; give time or cost") from err


def read_prices(text: str | None, num_devices: int = 1) -> tuple[float, ...]:
    """Prices of an hour of one GPU: one, or one for each device; empty where none is given."""
    if text is None:
        return ()
    rule = "give a price of an hour of one GPU, such as 2.5"
    prices = tuple(_real("--price-per-gpu-hour", part, rule) for part in str(text).split(","))
    if not all(0 < price < math.inf for price in prices):
        raise ConfigError(f"--price-per-gpu-hour {text} is not above 0; {rule}")
    if len(prices) not in (1, num_devices):
        raise ConfigError(
            f"--price-per-gpu-hour has {len(prices)} prices for {num_devices} devices; give one, "
            "or one for each"
        )
    return prices


def _of_length(config: RunConfig, seq_length: int) -> Any:
    positions = config.model.max_position_embeddings
    longest = max(positions, seq_length) if positions else positions
    return replace(config.model, seq_length=seq_length, max_position_embeddings=longest)
