"""What runs: model shape, parallelism, batch, precision, recompute, overlap, cadence.

A ``RunConfig`` is complete: with a calibration it determines the operators, the timeline and the
forecast.  A *layout* is a ``RunConfig`` that differs from the running one in parallelism,
micro-batch size or recompute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..errors import ConfigError


class Normalization(Enum):
    """Norm operator of each layer, by Megatron's name."""

    LAYER_NORM = "LayerNorm"
    RMS_NORM = "RMSNorm"


class PositionEmbedding(Enum):
    """How positions enter the model, by Megatron's name."""

    LEARNED = "learned_absolute"
    ROPE = "rope"
    NONE = "none"


class Recompute(Enum):
    """Which activations are computed again in the backward phase."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Precision(Enum):
    """Arithmetic of the forward and backward phases; parameters and gradients follow Megatron."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def nbytes(self) -> int:
        """Bytes of one activation element."""
        return 4 if self is Precision.FP32 else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense GPT as Megatron builds it (sizes of the whole model, before any split)."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    seq_length: int
    vocab_size: int
    """Rows of the embedding after padding, as the running layout has it."""
    is_gated: bool = False
    has_bias: bool = True
    is_tied: bool = True
    normalization: Normalization = Normalization.LAYER_NORM
    position_embedding: PositionEmbedding = PositionEmbedding.LEARNED
    max_position_embeddings: int = 0

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "seq_length",
            "vocab_size",
        ):
            _at_least_one(name, getattr(self, name))
        if self.num_attention_heads % self.num_query_groups:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_query_groups {self.num_query_groups}; choose a divisor of the heads"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Degrees of parallelism and what overlaps; ``num_ranks = tp * pp * dp``."""

    tp: int = 1
    pp: int = 1
    vp: int = 1
    dp: int = 1
    is_sequence_parallel: bool = False
    is_optimizer_distributed: bool = False
    overlaps_grad_reduce: bool = False
    overlaps_param_gather: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vp", "dp"):
            _at_least_one(name, getattr(self, name))

    @property
    def num_ranks(self) -> int:
        """Ranks that the layout occupies."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples per forward pass of one rank, and per step of all."""

    micro_batch_size: int
    global_batch_size: int

    def __post_init__(self) -> None:
        _at_least_one("micro_batch_size", self.micro_batch_size)
        _at_least_one("global_batch_size", self.global_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """How long the run is and what happens between steps; 0 means never or unknown."""

    train_iters: int = 0
    eval_interval: int = 0
    eval_iters: int = 0
    save_interval: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that determines a step, plus the cadence of the run."""

    model: ModelShape
    parallelism: Parallelism
    batch: Batch
    precision: Precision = Precision.FP32
    recompute: Recompute = Recompute.NONE
    recompute_num_layers: int = 0
    """Layers per stage that are recomputed under ``FULL``; 0 means all."""
    cadence: Cadence = field(default_factory=Cadence)
    device: str = "cpu"
    """Name of the accelerator as the driver gives it, or ``cpu``."""
    framework: str = ""
    """Host framework and version, for the report."""
    unmodelled: tuple[str, ...] = ()
    """Settings of the run that the model leaves out, by name; listed in every report."""

    def __post_init__(self) -> None:
        check_layout(self)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches that each rank runs in one step."""
        return self.batch.global_batch_size // (self.batch.micro_batch_size * self.parallelism.dp)

    @property
    def layers_per_stage(self) -> int:
        """Transformer layers on each stage (stages are even in this version)."""
        return self.model.num_layers // self.parallelism.pp

    def to_json(self) -> dict[str, Any]:
        """A JSON value that ``from_json`` reads back to an equal config."""
        return _encode(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> RunConfig:
        """The config that ``to_json`` wrote; unknown keys are ignored, missing ones default."""
        return _decode_run(value)


def check_layout(config: RunConfig) -> None:
    """Raise ``ConfigError`` (value, rule, remedy) where the layout cannot run."""
    model, par, batch = config.model, config.parallelism, config.batch
    if model.num_layers % (par.pp * par.vp):
        raise ConfigError(
            f"num_layers {model.num_layers} does not split over pp {par.pp} x vp {par.vp}; "
            f"nearest that do: {_nearest_splits(model.num_layers, par.pp, par.vp)}"
        )
    if par.vp > 1 and par.pp < 2:
        raise ConfigError(f"vp {par.vp} needs a pipeline, but pp is {par.pp}; set pp >= 2 or vp 1")
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "vocab_size"):
        if getattr(model, name) % par.tp:
            raise ConfigError(
                f"{name} {getattr(model, name)} is not a multiple of tp {par.tp}; "
                f"choose tp from {_divisors(getattr(model, name))}"
            )
    if par.is_sequence_parallel and model.seq_length % par.tp:
        raise ConfigError(
            f"seq_length {model.seq_length} is not a multiple of tp {par.tp}; "
            f"choose tp from {_divisors(model.seq_length)} or leave sequence parallelism off"
        )
    share = batch.micro_batch_size * par.dp
    if batch.global_batch_size % share:
        raise ConfigError(
            f"global_batch_size {batch.global_batch_size} is not a multiple of micro_batch_size "
            f"{batch.micro_batch_size} x dp {par.dp}; nearest that is: "
            f"{max(1, round(batch.global_batch_size / share)) * share}"
        )
    if par.vp > 1 and config.num_microbatches % par.pp:
        raise ConfigError(
            f"num_microbatches {config.num_microbatches} is not a multiple of pp {par.pp} as "
            f"interleaving needs; change micro_batch_size or set vp 1"
        )


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} {value} is below 1; give a positive whole number")


def _divisors(number: int) -> str:
    found = [d for d in (1, 2, 4, 8, 16, 32, 64) if number % d == 0]
    return ", ".join(str(d) for d in found)


def _nearest_splits(num_layers: int, pp: int, vp: int) -> str:
    pairs = [
        (abs(p * v - pp * vp), abs(p - pp), p, v)
        for p in range(1, num_layers + 1)
        for v in range(1, max(vp, 1) + 1)
        if num_layers % (p * v) == 0 and (v == 1 or p > 1)
    ]
    return ", ".join(f"pp {p} x vp {v}" for _, _, p, v in sorted(pairs)[:2])


def _encode(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_encode(v) for v in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _encode(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


_PARTS: dict[str, Any] = {
    "model": ModelShape,
    "parallelism": Parallelism,
    "batch": Batch,
    "cadence": Cadence,
    "precision": Precision,
    "recompute": Recompute,
    "normalization": Normalization,
    "position_embedding": PositionEmbedding,
}


def _decode_run(value: dict[str, Any]) -> RunConfig:
    return _decode(RunConfig, value)


def _decode(kind: Any, value: dict[str, Any]) -> Any:
    known = {k: v for k, v in value.items() if k in kind.__dataclass_fields__}
    for name, part in known.items():
        home = _PARTS.get(name)
        if home is None:
            known[name] = tuple(part) if isinstance(part, list) else part
        elif issubclass(home, Enum):
            known[name] = home(part)
        else:
            known[name] = _decode(home, part)
    try:
        return kind(**known)
    except TypeError as err:
        raise ConfigError(f"{kind.__name__} is incomplete: {err}; write it with to_json") from err
