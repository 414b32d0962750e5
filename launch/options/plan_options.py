"""Options of ``forerun plan``: parsing and meaning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, TypeAlias

from ...calib.arguments.short_names import LayoutConstraint
from ...calib.errors import ConfigError
from ...calib.forecast.remaining_schedule import read_count
from ...calib.memory.devices import known_device
from ...calib.units import GIB
from ...calib.workload.argument_values import shown, whole
from ...calib.workload.config import Batch, RunConfig
from ...calib.workload.model_shape import at_least_one, at_most

NUM_TOP = 10
"""Default number of rows of a plan."""
_MOST_GIB = 1e9
"""Anything larger is a unit mistake; the limit also keeps bytes within 64 bits."""
_MOST_COUNTS = 32
"""A longer table is not readable, and each count takes its own search."""
_MOST_TOKENS = 10**15
_PER_GPU = "xgpus"


class Objective(Enum):
    """Criterion by which layouts are ranked."""

    TIME = "time"
    """Seconds for a given number of samples."""
    COST = "cost"
    """GPU-hours for a given number of samples, times their price if stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRule:
    """The global batch size for a number of ranks, in samples."""

    samples: int = 0
    """Samples over all ranks; 0: as in the run."""
    samples_per_rank: int = 0
    """Samples per rank; the batch is this times the number of ranks."""
    follows_ranks: bool = False
    """Keep the run's number of samples per rank."""

    def size(self, running: RunConfig, num_ranks: int) -> int:
        """Return samples per step on ``num_ranks`` ranks; ``ConfigError`` if not a whole number."""
        here, running_ranks = running.batch.global_batch_size, running.parallelism.num_ranks
        if not self.follows_ranks:
            return self.samples_per_rank * num_ranks or self.samples or here
        if here * num_ranks % running_ranks:
            raise ConfigError(
                "--global-batch-size xGPUS is not a whole number of samples on "
                f"{num_ranks} GPUs (the run has {here} on {running_ranks}); choose other numbers "
                "of GPUs, or give samples"
            )
        return here * num_ranks // running_ranks


Several: TypeAlias = "str | float | Sequence[str] | Sequence[float] | None"
"""One value, several, or the text of an option; None: not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOption:
    """An option of a plan: its words for the command line, and its reader."""

    names: tuple[str, ...]
    metavar: str
    description: str
    read: Callable[[str, Any], Any]
    """Function of the option's name, for errors, and of its value or text."""

    @property
    def parameter(self) -> str:
        """Name of the option as a parameter of ``Run.plan``.

        >>> PLAN_OPTIONS["batch"].names, PLAN_OPTIONS["batch"].parameter
        (('--global-batch-size', '--gbs'), 'global_batch_size')
        """
        return self.names[0].lstrip("-").replace("-", "_")

    @property
    def declaration(self) -> str:
        """The option as a verb declares its arguments."""
        return f"{' '.join(self.names)} {self.metavar}  {self.description}\n"


def _option(
    names: str, metavar: str, read: Callable[[str, Any], Any], description: str
) -> dict[str, PlanOption]:
    option = PlanOption(
        names=tuple(names.split()), metavar=metavar, description=description, read=read
    )
    return {"option": option}


def _positive(option: str, text: object) -> int:
    """Return a whole number above 0."""
    number = whole(option.lstrip("-").replace("-", "_"), text)
    at_least_one(option, number)
    at_most(option, number)
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """Parsed options of a plan; each is declared here alone."""

    counts: tuple[int, ...] = field(default=(), metadata=_option(
        "--gpus", "N|A..B|N,N", lambda _, value: read_counts(_text(value)),
        "numbers of GPUs: one, several separated by commas, or 8..1024 for 8, 16, 32 and so on up "
        "to 1024 (default: as in the run)",
    ))  # fmt: skip
    """Numbers of ranks; empty: as in the run."""
    ranks_per_node: int = field(default=0, metadata=_option(
        "--gpus-per-node", "N", _positive, "(default: as in the run)"
    ))  # fmt: skip
    """Ranks of each node; 0: as in the run."""
    devices: tuple[str, ...] = ()
    """Devices, by the driver's name; empty: the run's device."""
    batch: BatchRule = field(default=BatchRule(), metadata=_option(
        "--global-batch-size --gbs", "N|xGPUS", lambda _, value: read_batch(_text(value)),
        "samples of a step; xGPUS: as many per GPU as in the run; 4xGPUS: four per GPU",
    ))  # fmt: skip
    seq_length: int = field(default=0, metadata=_option(
        "--seq-length --seq", "N", _positive, "tokens of a sample"
    ))  # fmt: skip
    """Tokens per sample; 0: as in the run."""
    memory_nbytes: int | None = field(default=None, metadata=_option(
        "--memory-gib", "X", lambda _, value: _memory_nbytes(str(value)),
        "memory of one GPU in GiB (default: as in the run)",
    ))  # fmt: skip
    objective: Objective = field(default=Objective.TIME, metadata=_option(
        "--objective", "time|cost", lambda _, value: _objective(value),
        "order of the rows (default time)",
    ))  # fmt: skip
    num_tokens: int = field(default=0, metadata=_option(
        "--tokens", "N", lambda _, value: read_tokens(value),
        "days, steps and GPU-hours of a run to so many tokens, as 300B, 1T or 2e12",
    ))  # fmt: skip
    """Tokens of the whole run; 0: not requested."""
    prices: tuple[float, ...] = field(default=(), metadata=_option(
        "--price-per-gpu-hour", "X", lambda _, value: read_prices(_text(value)),
        "price of an hour of one GPU: one, or of plan one for each --device, with commas",
    ))  # fmt: skip
    """Price per GPU-hour of each device; empty: not stated."""
    keep: LayoutConstraint | None = field(default=None, metadata=_option(
        "--keep", "tp=8,pp=1|2", lambda _, value: _keep(value), "only layouts with these values"
    ))  # fmt: skip
    why: LayoutConstraint | None = field(default=None, metadata=_option(
        "--why", "tp=16", lambda _, value: _keep(value), "why such layouts are not at the top"
    ))  # fmt: skip
    top: int = field(default=NUM_TOP, metadata=_option(
        "--top", "K", _positive, f"number of rows to show (default {NUM_TOP})"
    ))  # fmt: skip

    def __post_init__(self) -> None:
        """Require one price, or one for each device."""
        if len(self.prices) not in (0, 1, max(1, len(self.devices))):
            raise ConfigError(
                f"--price-per-gpu-hour has {len(self.prices)} prices for "
                f"{max(1, len(self.devices))} devices; give one, or one for each"
            )

    def price(self, place: int) -> float | None:
        """Return the price per GPU-hour of the device at index ``place``; None if not stated."""
        return self.prices[min(place, len(self.prices) - 1)] if self.prices else None

    def apply_to(self, config: RunConfig, num_ranks: int, *, is_placed: bool = False) -> RunConfig:
        """Return the run with the requested sample length and node size, and the batch for that
        many ranks.

        Its DP and micro-batch are reduced until they divide the batch; ``is_placed``: from as many
        replicas as these ranks have room for.
        """
        batch, par, model = self.batch.size(config, num_ranks), config.parallelism, config.model
        num_replicas = num_ranks * par.dp // par.num_ranks if is_placed else par.dp
        dp = math.gcd(max(1, num_replicas), batch)
        micro = math.gcd(config.batch.micro_batch_size, batch // dp)
        if length := self.seq_length:
            positions = model.max_position_embeddings and max(model.max_position_embeddings, length)
            model = replace(model, seq_length=length, max_position_embeddings=positions)
        full = batch if config.cadence.full_batch_size else config.cadence.full_batch_size
        nodes = self.ranks_per_node or par.ranks_per_node
        return replace(
            config,
            model=model,
            parallelism=replace(par, dp=dp, ranks_per_node=nodes),
            batch=Batch(micro_batch_size=micro, global_batch_size=batch),
            cadence=replace(config.cadence, full_batch_size=full),
        )


PLAN_OPTIONS: Mapping[str, PlanOption] = {
    spec.name: spec.metadata["option"] for spec in fields(PlanQuestion) if spec.metadata
}
"""Options of a plan by the field that they set."""


def read_question(*, device: Several = None, **values: Any) -> PlanQuestion:
    """Return the question stated by values, or texts of options, under the options' names.

    Raises ``ConfigError`` with value, rule and remedy if one is invalid, and ``TypeError`` for a
    name that is no option.

    >>> read_question(gpus="8..16", gbs=64).counts
    Traceback (most recent call last):
    TypeError: plan() got an unexpected keyword argument 'gbs'
    """
    names = _text(device).split(",") if device is not None else ()
    read: dict[str, Any] = {}
    for name, option in PLAN_OPTIONS.items():
        if (value := values.pop(option.parameter, None)) not in (None, ""):
            read[name] = option.read(option.names[0], value)
    if values:
        raise TypeError(f"plan() got an unexpected keyword argument {next(iter(values))!r}")
    devices = tuple(dict.fromkeys(known_device(name).driver_name for name in names))
    return PlanQuestion(devices=devices, **read)


def _text(value: Several) -> str:
    """Return a value as option text.

    >>> _text([8, 16]), _text("8..64"), _text(2.5)
    ('8,16', '8..64', '2.5')
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        return str(value)
    return ",".join(map(str, value))


def _keep(constraint: str | Mapping[str, Any] | None) -> LayoutConstraint | None:
    """Return the constraint given as text, or as values by axis name.

    >>> str(_keep({"tp": 8, "pp": (1, 2)}))
    'tp=8,pp=1|2'
    """
    if isinstance(constraint, Mapping):
        texts = ((name, _text(values).replace(",", "|")) for name, values in constraint.items())
        constraint = ",".join(f"{name}={text}" for name, text in texts)
    return LayoutConstraint.parse(constraint) if constraint else None


def read_counts(text: str) -> tuple[int, ...]:
    """Return numbers of GPUs: one, several separated by commas, or a doubling range.

    ``A..B`` is A times the powers of two, up to B; B need not be one of them.

    >>> read_counts("8..64"), read_counts("64,96,8"), read_counts("6..30")
    ((8, 16, 32, 64), (64, 96, 8), (6, 12, 24))
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, is_range, last = part.partition("..")
        begin = _positive("--gpus", first)
        end = _positive("--gpus", last) if is_range else begin
        if end < begin:
            raise ConfigError(f"--gpus {part} ends below its start; write {end}..{begin}")
        while begin <= end:
            numbers.append(begin)
            begin *= 2
    counts = tuple(dict.fromkeys(numbers))
    if len(counts) > _MOST_COUNTS:
        raise ConfigError(
            f"--gpus has {len(counts)} numbers of GPUs; give at most {_MOST_COUNTS} at once"
        )
    return counts


def read_tokens(text: object) -> int:
    """Return a number of tokens; ``ConfigError`` if the text is not one.

    >>> read_tokens("1T"), read_tokens("2.3b"), read_tokens("2e12"), read_tokens(300)
    (1000000000000, 2300000000, 2000000000000, 300)
    """
    rule = f"--tokens {shown(text)} is not a number of tokens; give one such as 300B or 1T"
    number = read_count(str(text), rule)
    if not 0 < number < _MOST_TOKENS:
        raise ConfigError(rule)
    return number


def read_batch(text: str) -> BatchRule:
    """Parse a batch rule: a number, ``xGPUS`` (the run's number of samples per GPU), ``4xGPUS``
    (four per GPU), or empty for the run's batch.

    >>> read_batch("4xGPUS").samples_per_rank, read_batch("xGPUS").follows_ranks
    (4, True)
    >>> read_batch("512")
    BatchRule(samples=512, samples_per_rank=0, follows_ranks=False)
    """
    low = text.strip().lower()
    if not low.endswith(_PER_GPU):
        return BatchRule(samples=_positive("--global-batch-size", text) if low else 0)
    if number := low.removesuffix(_PER_GPU):
        return BatchRule(samples_per_rank=_positive("--global-batch-size", number))
    return BatchRule(follows_ranks=True)


def read_prices(text: str) -> tuple[float, ...]:
    """Return prices per GPU-hour: one, or one for each device."""
    rule = "give a price of an hour of one GPU, such as 2.5"
    prices = tuple(_real("--price-per-gpu-hour", part, rule) for part in text.split(","))
    if not all(0 < price < math.inf for price in prices):
        raise ConfigError(f"--price-per-gpu-hour {text} is not above 0; {rule}")
    return prices


def _real(option: str, text: str, rule: str) -> float:
    try:
        return float(text)
    except ValueError as err:
        raise ConfigError(f"{option} {shown(text)} is not a number; {rule}") from err


def _memory_nbytes(text: str) -> int:
    rule = "give a number of GiB above 0"
    gib = _real("--memory-gib", text, rule)
    if not 0 < gib < _MOST_GIB:
        raise ConfigError(f"--memory-gib {gib:g} is not a size of memory; {rule}")
    return int(gib * GIB)


def _objective(text: str) -> Objective:
    try:
        return Objective(text.lower())
    except ValueError as err:
        raise ConfigError(f"--objective {shown(text)} is not known; give time or cost") from err
