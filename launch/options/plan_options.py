"""Options of ``forerun plan``: parsing and meaning."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias

from ...calib.arguments import LayoutConstraint
from ...calib.errors import ConfigError
from ...calib.forecast import read_count
from ...calib.memory import known_device
from ...calib.units import GIB
from ...calib.workload import Batch, RunConfig, at_least_one, at_most, shown, whole

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """Parsed options of a plan."""

    counts: tuple[int, ...]
    """Numbers of ranks; empty: as in the run."""
    ranks_per_node: int
    """Ranks of each node; 0: as in the run."""
    devices: tuple[str, ...]
    """Devices, by the driver's name; empty: the run's device."""
    batch: BatchRule
    seq_length: int
    """Tokens per sample; 0: as in the run."""
    memory_nbytes: int | None
    objective: Objective
    prices: tuple[float, ...]
    """Price per GPU-hour of each device; empty: not stated."""
    num_tokens: int
    """Tokens of the whole run; 0: not requested."""
    keep: LayoutConstraint | None
    why: LayoutConstraint | None
    top: int

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


Several: TypeAlias = "str | float | Sequence[str] | Sequence[float] | None"
"""One value, several, or the text of an option; None: not given."""


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
    """Return the question stated by values or by texts of options.

    Raises ``ConfigError`` with value, rule and remedy if one is invalid.
    """
    names = (_text(device) or "").split(",") if device is not None else ()
    devices = tuple(dict.fromkeys(known_device(name).driver_name for name in names))
    return PlanQuestion(
        counts=read_counts(counts) if (counts := _text(gpus)) else (),
        ranks_per_node=_positive("--gpus-per-node", gpus_per_node),
        devices=devices,
        batch=read_batch(_text(global_batch_size) or ""),
        seq_length=_positive("--seq-length", seq_length),
        memory_nbytes=None if memory_gib is None else _memory_nbytes(str(memory_gib)),
        objective=_objective(objective),
        prices=read_prices(_text(price_per_gpu_hour), max(1, len(devices))),
        num_tokens=0 if tokens is None else read_tokens(tokens),
        keep=_keep(keep),
        why=_keep(why),
        top=_positive("--top", top),
    )


def _text(value: Several) -> str | None:
    """Return a value as option text.

    >>> _text([8, 16]), _text("8..64"), _text(2.5), _text(None)
    ('8,16', '8..64', '2.5', None)
    """
    if value is None or isinstance(value, str):
        return value
    return ",".join(map(str, value)) if isinstance(value, Iterable) else str(value)


def _keep(constraint: str | Mapping[str, Any] | None) -> LayoutConstraint | None:
    """Return the constraint given as text, or as values by axis name.

    >>> str(_keep({"tp": 8, "pp": (1, 2)}))
    'tp=8,pp=1|2'
    """
    if isinstance(constraint, Mapping):
        texts = (
            (name, (_text(values) or "").replace(",", "|")) for name, values in constraint.items()
        )
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


def read_prices(text: str | None, num_devices: int = 1) -> tuple[float, ...]:
    """Return prices per GPU-hour: one, or one for each device; empty if none is given."""
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


def _positive(option: str, text: object) -> int:
    """Return a whole number above 0; 0 if none is given."""
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
