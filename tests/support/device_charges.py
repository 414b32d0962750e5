"""Cost of operators on a stand-in for a device: FLOP of products, bytes of everything else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from device_calls import Calls
from device_clock import Clock
from device_streams import Device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

FLOOR_S = 6e-6
FLOP_PER_S = 2e10
BYTES_PER_S = 2e9
"""With these, operators of models of some thousand numbers a layer take 20 us to some ms."""
_FREE = frozenset(
    {
        "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty",
        "new_empty_strided", "_unsafe_view", "set_", "resize_", "lift_fresh", "is_same_size",
        "_has_same_storage_numel", "sym_size", "sym_numel", "sym_stride", "sym_storage_offset",
        "is_pinned", "record_stream", "_reshape_alias", "alias", "detach", "detach_",
        "_local_scalar_dense", "result_type", "can_cast", "dim", "size", "requires_grad_",
    }
)  # fmt: skip
_ASKS = frozenset(
    {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique"}
)
"""Operators whose result the host needs before it can go on."""
_SPACES = frozenset({"aten", "fsdp", "prims"})
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    """Properties of an operator that its name determines."""

    name: str
    is_free: bool
    is_synchronizing: bool


class Charges(TorchDispatchMode):
    """Charges each operator to the stream that is current where it is called."""

    def __init__(self, clock: Clock, device: Device, calls: Calls) -> None:
        super().__init__()
        self._clock, self._device, self._calls = clock, device, calls
        self._costs: dict[Any, _Cost] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and charge it."""
        given = kwargs or {}
        result = func(*args, **given)
        cost = self._costs.get(func)
        if cost is None:
            cost = self._costs[func] = _cost(func)
        if cost.is_synchronizing:
            self._device.forbid(cost.name, is_of_thread=True)
        if not cost.is_free and not self._device.is_capturing():
            self._charge(func, cost.name, (*args, *given.values()), args, given, result)
        if cost.is_synchronizing:
            self._clock.synchronize(self._device.line)
        return result

    def _charge(
        self, func: Any, name: str, values: tuple[Any, ...], args: Any, kwargs: Any, result: Any
    ) -> None:
        nbytes = sum(map(_nbytes, _tensors((*values, result))))
        if nbytes == 0:
            return
        flop = _flop(func, name, args, kwargs, result)
        line = self._device.line
        busy_s = flop / FLOP_PER_S if flop else nbytes / BYTES_PER_S
        begin_s, end_s = self._clock.launch(line, FLOOR_S + busy_s)
        self._clock.truth.add(
            "kernels",
            stream=line.number,
            begin_s=begin_s,
            end_s=end_s,
            op=name,
            nbytes=nbytes,
            flop=flop,
            **self._calls.where(),
        )


def _cost(func: Any) -> _Cost:
    schema = func._schema
    space, name = schema.name.split("::")
    aliases = [one.alias_info for one in schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    is_unasked = space in _SPACES and not is_view and name not in _FREE
    return _Cost(name=name, is_free=not is_unasked, is_synchronizing=name in _ASKS)


def _flop(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    count = flop_registry.get(func._overloadpacket)
    if count is not None:
        return int(count(*args, **kwargs, out_val=result))
    if name.startswith(_ATTENTION):
        # Two products in forward, five in backward.
        is_backward = name.endswith("backward")
        query, key = args[is_backward : is_backward + 2]
        return (5 if is_backward else 2) * 2 * query.numel() * key.shape[-2]
    return 0


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _nbytes(tensor: Any) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return local.numel() * local.element_size()
