"""Observation of one warm-up step of a run that no framework describes: its batch, and its
model."""

from __future__ import annotations

import logging
import math
from collections import Counter, UserDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ...calib.arguments.hugging_face import Training, from_training
from ...calib.errors import ConfigError
from ...calib.records.record_kinds import LoopRecord
from ...calib.workload.config import Cadence, RunConfig
from ..process.guard import Guard
from ..process.host import update_calls, updated_by
from ..process.inspection import attribute, contents, is_a, module_name, tree, weights
from ..process.settings import RankInfo
from ..sensors.module_calls import CALLS, entries_of
from ..sensors.sites import transformers_config
from .chain import is_engine, is_flattened, is_sharded, is_split, num_copies, num_replicas
from .instruments import device_name

_log = logging.getLogger(__name__)
_DEPTH = 8
"""Limit on nested containers searched for a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkSettings:
    """Facts from a framework's own arguments."""

    cadence: Cadence = field(default_factory=Cadence)
    autocast_dtype: str = ""
    fuses_head: bool = False
    framework: str = ""
    num_microbatches: int = 0
    """Micro-batches per step; 0 means as many as the first step ran."""


class FirstStep:
    """Counter of passes and reader of a batch's shape, at calls that are watched until
    ``close``."""

    def __init__(self, chain: Iterable[torch.nn.Module], guard: Guard) -> None:
        self._passes: Counter[int] = Counter()
        self._shape: tuple[int, ...] = ()
        self._num_samples = 0
        self._autocast_dtype = ""
        CALLS.watch(self, entries_of(((module, self) for module in chain), guard))

    def close(self) -> None:
        """Stop watching."""
        CALLS.unwatch(self)

    def begin(self, module: Any) -> bool | None:
        """Begin a call of a module of the chain; None if gradients are disabled."""
        with torch._C.DisableTorchFunction():
            return torch.is_grad_enabled() or None

    def fail(self, begun: Any) -> None:
        """Ignore a call that raised."""

    def end(self, begun: Any, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Count a call, and read the shape of its batch."""
        self._passes[id(module)] += 1
        with torch._C.DisableTorchFunction():
            shape = batch_shape((args, kwargs))
            if len(shape) == 2 and not self._shape:
                self._shape = shape
                self._autocast_dtype = _autocast_dtype(_device_type((args, kwargs)))
        self._num_samples = self._num_samples or (shape[0] if shape else 0)

    def loop(self, chain: tuple[torch.nn.Module, ...], known: FrameworkSettings) -> LoopRecord:
        """Return this rank's work per step, without a batch if ranks share their samples."""
        passes = known.num_microbatches or max(self._passes.values(), default=0)
        if is_split(chain):
            passes = 0
        trained = [w for w in weights(chain[:1]) if w.requires_grad]
        return LoopRecord(
            num_steps=known.cadence.train_iters,
            samples=passes * (self._shape[0] if self._shape else self._num_samples),
            tokens=passes * math.prod(self._shape) if self._shape else 0,
            num_replicas=num_replicas(chain),
            grad_nbytes=sum(weight.numel() * weight.element_size() for weight in trained),
        )

    def run_config(
        self,
        chain: tuple[torch.nn.Module, ...],
        optimizer: Any,
        rank: RankInfo,
        known: FrameworkSettings,
    ) -> RunConfig | None:
        """Return the run's configuration if the model's is of a known kind; else log why and return
        None."""
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
        self,
        chain: tuple[torch.nn.Module, ...],
        optimizer: Any,
        rank: RankInfo,
        known: FrameworkSettings,
    ) -> RunConfig:
        if any(map(is_engine, chain)):
            raise ConfigError(
                "DeepSpeed's engine partitions and reduces in ways that are not modelled"
            )
        config = next((c for c in map(transformers_config, chain) if c is not None), None)
        weight = next(iter((*updated_by(optimizer), *weights(chain))), None)
        if config is None or weight is None or not self._shape:
            raise ConfigError(
                "the model has no transformers configuration, or its input is not tokens"
            )
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
                element_dtype=_name(weight.dtype),
                autocast_dtype=known.autocast_dtype or self._autocast_dtype,
                fuses_head=known.fuses_head,
                recomputes=any(attribute(m, "gradient_checkpointing") for m in tree(*chain[:1])),
                cadence=known.cadence,
                device=device_name(chain),
                framework=known.framework or f"PyTorch {torch.__version__}",
            ),
        )


def is_self_described(models: Iterable[torch.nn.Module]) -> bool:
    """Return True if a model carries a transformers configuration."""
    return any(transformers_config(model) is not None for model in models)


def batch_shape(value: Any) -> tuple[int, ...]:
    """Return samples and tokens of a batch of whole numbers, else only samples; empty without
    tensors."""
    with torch._C.DisableTorchFunction():
        tensors = [*_tensors(value)]
        tokens = next((t for t in tensors if _is_tokens(t)), None)
        if tokens is not None:
            return tuple(tokens.shape)
        return next(((int(t.shape[0]),) for t in tensors if t.dim()), ())


def _tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield tensors of torch's own types, from containers read by Python's own methods alone."""
    if is_a(value, torch.Tensor):
        if module_name(value).partition(".")[0] == "torch":
            yield value
    elif depth < _DEPTH:
        parts: Any = ()
        if is_a(value, dict):
            parts = dict.values(value)
        elif is_a(value, UserDict):
            parts = (contents(value).get("data"),)
        elif is_a(value, tuple):
            parts = tuple.__iter__(value)
        elif is_a(value, list):
            parts = list.__iter__(value)
        for part in parts:
            yield from _tensors(part, depth + 1)


def _is_tokens(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point()


def _autocast_dtype(device_type: str) -> str:
    is_on = torch.is_autocast_enabled(device_type)
    return _name(torch.get_autocast_dtype(device_type)) if is_on else ""


def _device_type(value: Any) -> str:
    return next(tensor.device.type for tensor in _tensors(value) if _is_tokens(tensor))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
