"""What one warm-up step shows of a run that no framework describes: its batch, and its model."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...calib.arguments.hugging_face import Training, from_training
from ...calib.errors import ConfigError
from ...calib.records.record_kinds import LoopRecord
from ...calib.workload.config import Cadence, RunConfig
from ..process.guard import Guard
from ..process.host import update_calls
from ..process.settings import RankInfo
from .chain import is_flattened, is_sharded, is_split, num_copies, num_replicas
from .instruments import device_name

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a framework's own arguments add."""

    cadence: Cadence = field(default_factory=Cadence)
    autocast_dtype: str = ""
    framework: str = ""
    num_microbatches: int = 0
    """0: as many as the first step ran."""


class FirstStep:
    """Counts passes and reads the shape of a batch, through hooks that are gone by ``close``."""

    def __init__(self, chain: Iterable[torch.nn.Module], guard: Guard) -> None:
        self._passes: Counter[int] = Counter()
        self._shape: tuple[int, ...] = ()
        self._num_samples = 0
        self._autocast_dtype = ""
        self._handles = [
            module.register_forward_pre_hook(guard.protect(self._see), with_kwargs=True)
            for module in chain
            if getattr(module, "_compiled_call_impl", None) is None
        ]

    def close(self) -> None:
        """Take the hooks away."""
        while self._handles:
            self._handles.pop().remove()

    def _see(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._passes[id(module)] += 1
            shape = batch_shape((args, kwargs))
            if len(shape) == 2 and not self._shape:
                self._shape = shape
                self._autocast_dtype = _autocast_dtype(_device_type((args, kwargs)))
            self._num_samples = self._num_samples or (shape[0] if shape else 0)

    def loop(self, chain: tuple[torch.nn.Module, ...], known: Known) -> LoopRecord:
        """What a step of this rank works on; without a batch where ranks share their samples."""
        passes = known.num_microbatches or max(self._passes.values(), default=0)
        if is_split(chain):
            passes = 0
        weights = [w for model in chain[:1] for w in model.parameters() if w.requires_grad]
        return LoopRecord(
            num_steps=known.cadence.train_iters,
            samples=passes * (self._shape[0] if self._shape else self._num_samples),
            tokens=passes * math.prod(self._shape) if self._shape else 0,
            num_replicas=num_replicas(chain),
            grad_nbytes=sum(weight.numel() * weight.element_size() for weight in weights),
        )

    def run_config(
        self, chain: tuple[torch.nn.Module, ...], optimizer: Any, rank: RankInfo, known: Known
    ) -> RunConfig | None:
        """The run, where its model carries a configuration of a known kind; else None, and said."""
        try:
            return self._run_config(chain, optimizer, rank, known)
        except ConfigError as err:
            if rank.rank == 0:
                _log.warning(
                    "[forerun] no layout is modelled: %s; steps, phases and collectives are "
                    "recorded",
                    str(err),
                )
            return None

    def _run_config(
        self, chain: tuple[torch.nn.Module, ...], optimizer: Any, rank: RankInfo, known: Known
    ) -> RunConfig:
        config = next((c for c in map(_config_of, chain) if c is not None), None)
        if config is None or not self._shape:
            raise ConfigError(
                "the model has no transformers configuration, or its input is not tokens"
            )
        inner = [module for model in chain[:1] for module in model.modules()]
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        return from_training(
            config,
            Training(
                micro_batch_size=self._shape[0],
                seq_length=self._shape[1],
                num_microbatches=known.num_microbatches or max(self._passes.values()),
                num_ranks=rank.world_size,
                ranks_per_node=rank.local_world_size,
                is_sharded=is_sharded(chain),
                num_copies=num_copies(chain),
                sharded_update_calls=0 if is_flattened(chain) else update_calls(optimizer),
                element_dtype=_name(next(weights).dtype),
                autocast_dtype=known.autocast_dtype or self._autocast_dtype,
                recomputes=any(getattr(m, "gradient_checkpointing", False) for m in inner),
                cadence=known.cadence,
                device=device_name(chain),
                framework=known.framework or f"PyTorch {torch.__version__}",
            ),
        )


def is_self_described(models: Iterable[torch.nn.Module]) -> bool:
    """True where a model carries a configuration of transformers."""
    return any(_config_of(model) is not None for model in models)


def batch_shape(value: Any) -> tuple[int, ...]:
    """Samples and tokens of a batch of whole numbers, samples alone of another; else nothing."""
    found = [*_tensors(value)]
    tokens = next((t for t in found if _is_tokens(t)), None)
    if tokens is not None:
        return tuple(tokens.shape)
    return next(((int(t.shape[0]),) for t in found if t.dim()), ())


def _config_of(module: torch.nn.Module) -> Mapping[str, Any] | None:
    for inner in module.modules():
        config: Any = getattr(inner, "config", None)
        if hasattr(config, "to_dict") and getattr(config, "model_type", ""):
            return config.to_dict()
    return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _is_tokens(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point()


def _autocast_dtype(device_type: str) -> str:
    is_on = torch.is_autocast_enabled(device_type)
    return _name(torch.get_autocast_dtype(device_type)) if is_on else ""


def _device_type(value: Any) -> str:
    return next(tensor.device.type for tensor in _tensors(value) if _is_tokens(tensor))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
