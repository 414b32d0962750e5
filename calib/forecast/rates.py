"""Throughput of a step time (tokens/s, TFLOP/s per GPU, MFU), and cost of the remaining run.

``docs/throughput.md`` has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ..errors import ConfigError
from ..fit.laws import family, work
from ..fit.operator_kinds import OperatorFamily
from ..fit.priors import UNKNOWN_DEVICE, device_prior
from ..layers.model_size import model_flop_per_token
from ..layers.stage_work import stage_operators
from ..plain_json import JsonObject
from ..units import HOUR_S, format_count, format_frac
from ..workload.config import Batch, Fp8Recipe, Recompute, RunConfig
from ..workload.config_json import Encoded
from ..workload.operators import OperatorCount
from ..workload.parallelism import Parallelism
from .forecast_record import Forecast

_PRODUCTS = (OperatorFamily.LINEAR, OperatorFamily.ATTENTION)
_GIGA = 1e9
_PASSES = 3
"""FLOP of the model over those of its forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput(Encoded):
    """Throughput of a layout with a given step time."""

    tokens_per_s: float
    """Tokens/s of all ranks."""
    tokens_per_s_per_gpu: float
    flop_per_s_per_gpu: float
    """FLOP/s of the model, as Megatron-LM counts them, without recompute."""
    mfu_frac: float | None
    """Model FLOP/s utilisation: ``flop_per_s_per_gpu`` over the dense peak of the data sheet; None
    if the peak is unknown, as for a CPU."""
    hfu_frac: float | None
    """Hardware FLOP/s utilisation: with recompute."""

    @property
    def gpu_hours_per_giga_token(self) -> float:
        """GPU-hours for 1e9 tokens."""
        return _GIGA / self.tokens_per_s_per_gpu / HOUR_S

    @property
    def text(self) -> str:
        """MFU, if known, and tokens/s in a line.

        >>> Throughput(tokens_per_s=71234.0, tokens_per_s_per_gpu=8904.25, mfu_frac=0.412,
        ...     flop_per_s_per_gpu=4.07e14, hfu_frac=0.412).text
        '41.2 % MFU · 71,200 tokens/s'
        """
        tokens = f"{format_count(self.tokens_per_s)} tokens/s"
        return tokens if self.mfu_frac is None else f"{format_frac(self.mfu_frac)} MFU · {tokens}"

    @property
    def rates(self) -> dict[str, float]:
        """Rates that are logged at each step, by key; MFU if known."""
        rates = {
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "mfu_frac": self.mfu_frac,
        }
        return {name: value for name, value in rates.items() if value is not None}


def throughput(config: RunConfig, step_time_s: float) -> Throughput:
    """Return tokens/s and FLOP/s of a layout with this step time.

    MFU and HFU are defined as for PaLM (Chowdhery et al. 2022, section 4.1 and appendix B), with
    FLOP as Megatron-LM counts them (``model_flop_per_token``); those of 8-bit and 4-bit runs are
    relative to the dense 8-bit peak.  Raises ``ConfigError`` if ``step_time_s`` is not above 0.
    """
    if not step_time_s > 0:
        raise ConfigError(f"a step of {step_time_s} s has no throughput; give a time above 0")
    tokens_per_s = config.batch.global_batch_size * config.model.seq_length / step_time_s
    each = tokens_per_s / config.parallelism.num_ranks
    flop_per_s = each * model_flop_per_token(config.model)
    peak = peak_flop_per_s(config)
    mfu = None if peak is None else flop_per_s / peak
    return Throughput(
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=each,
        flop_per_s_per_gpu=flop_per_s,
        mfu_frac=mfu,
        hfu_frac=None if mfu is None else mfu * (1.0 + recomputed_frac(config)),
    )


def peak_flop_per_s(config: RunConfig) -> float | None:
    """Return the data sheet's dense FLOP/s for the width of the run's matrix products.

    It is never the figure with sparsity, which is twice as high on A100 and later.  None for a CPU
    or an unknown device.

    >>> from ..workload.config import Batch, Precision
    >>> from ..workload.model_shape import ModelShape
    >>> from ..workload.parallelism import Parallelism
    >>> shape = ModelShape(num_layers=1, hidden_size=64, ffn_hidden_size=256, vocab_size=128,
    ...     num_attention_heads=1, num_query_groups=1, kv_channels=64, seq_length=16)
    >>> one = RunConfig(model=shape, parallelism=Parallelism(), precision=Precision.BF16,
    ...     batch=Batch(micro_batch_size=1, global_batch_size=1), device="NVIDIA H100 80GB HBM3")
    >>> round(peak_flop_per_s(one) / 1e12)
    989
    """
    prior = device_prior(config.device)
    if prior.name in (UNKNOWN_DEVICE, "cpu"):
        return None
    nbytes = 1 if config.fp8 is not Fp8Recipe.NONE else config.precision.nbytes
    return prior.peaks_for(nbytes).flop_per_s


def recomputed_frac(config: RunConfig) -> float:
    """Return the FLOP of recomputed products over those of the model: 1/3 for full recompute.

    The split of a layer does not change this, so that it is counted on one rank; if ``FULL``
    recomputes some layers of each chunk, they count as average layers.
    """
    if config.recompute is Recompute.NONE:
        return 0.0
    whole = replace(
        config,
        parallelism=Parallelism(),
        batch=Batch(micro_batch_size=1, global_batch_size=1),
        recompute_num_layers=0,
    )
    chunks = config.chunk_layers
    num_recomputed = sum(
        min(config.recompute_num_layers or num_layers, num_layers) for num_layers in chunks
    )
    return _whole_frac(whole) * num_recomputed / sum(chunks)


@lru_cache(maxsize=64)
def _whole_frac(config: RunConfig) -> float:
    stage = stage_operators(config, 0)
    return _flop(stage.recompute) / (_PASSES * _flop(stage.forward))


def _flop(operators: tuple[OperatorCount, ...]) -> float:
    return sum(work(one).flop * count for one, count in operators if family(one.kind) in _PRODUCTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingRun(Encoded):
    """Time and cost of the remaining run in one layout, the running one or another."""

    config: RunConfig
    step_time_s: float
    remaining_s: float
    """Time to the end, with evaluations, saves and failures."""
    now_unix_s: float | None = None
    price_per_gpu_hour: float | None = None
    restart_s: float = 0.0
    """Cost of restarting in another layout, seconds."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        names = ("remaining_s", "finish_unix_s", "gpu_hours", "cost")
        return {name: getattr(self, name) for name in names}

    @property
    def finish_unix_s(self) -> float | None:
        """Time of the end; None if the present one is unknown."""
        return None if self.now_unix_s is None else self.now_unix_s + self.remaining_s

    @property
    def gpu_hours(self) -> float:
        """GPU-hours to the end."""
        return self.remaining_s / HOUR_S * self.config.parallelism.num_ranks

    @property
    def cost(self) -> float | None:
        """Cost in the currency of the stated price."""
        price = self.price_per_gpu_hour
        return None if price is None else price * self.gpu_hours

    @staticmethod
    def of(
        ahead: Forecast,
        config: RunConfig,
        step_time_s: float | None = None,
        *,
        restart_s: float = 0.0,
    ) -> RemainingRun | None:
        """Return the remaining run of a forecast, with its price; None at the end.

        ``step_time_s`` is the running layout's step in the plan that others are compared in; None:
        that of the forecast.
        """
        step_s = step_time_s or ahead.step_time_s
        if ahead.remaining_s <= 0 or step_s <= 0:
            return None
        price = None
        if ahead.cost is not None and ahead.gpu_hours:
            price = ahead.cost / ahead.gpu_hours
        return RemainingRun(
            config=config,
            step_time_s=step_s,
            remaining_s=ahead.remaining_s,
            now_unix_s=ahead.now_unix_s or None,
            price_per_gpu_hour=price,
            restart_s=restart_s,
        )

    def in_layout(self, config: RunConfig, step_time_s: float) -> RemainingRun:
        """Return the remaining run if it continued in another layout.

        The remaining samples are the same for any global batch; evaluations, saves and failures
        scale with the step, as in the decision.  A layout other than this one has ``restart_s``
        added.
        """
        samples_ratio = self.config.batch.global_batch_size / config.batch.global_batch_size
        remaining_s = self.remaining_s * samples_ratio * step_time_s / self.step_time_s
        remaining_s += 0.0 if config == self.config else self.restart_s
        return replace(self, config=config, step_time_s=step_time_s, remaining_s=remaining_s)
