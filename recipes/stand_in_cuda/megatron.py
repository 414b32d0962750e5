"""Changes of the CPU stand-in to Megatron's own modules, each right after the module's import."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ...hooks.process.post_import import when_imported

HELPERS = "megatron.core.datasets.helpers_cpp"
NEED_TRITON = (
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
    "megatron.core.transformer.moe.ops.paged_stash",
)
"""Modules that import triton unguarded and define kernels that a CPU run never launches (0.16.1,
main)."""


_MOST_IN_FLIGHT = 16
"""Upper bound on the outputs of one rank that are being sent at the same time."""


def prepare() -> None:
    """Schedule the changes; modules that are already imported are changed now."""
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_is_not_about_shared_state)
    patches: dict[str, Callable[[ModuleType], None]] = {
        "megatron.core.transformer.torch_norm": _allow_sequence_parallel,
        "megatron.legacy.fused_kernels": _build_nothing("load"),
        "megatron.core.transformer.moe.moe_utils": _name_missing_product,
        "megatron.core.transformer.moe.token_dispatcher": _list_splits,
        "megatron.core.pipeline_parallel.schedules": _hold_what_is_sent,
        "megatron.core.fp8_utils": _quantize_nothing,
    }
    wheel = _helpers_of_the_wheel()
    if wheel is not None:
        patches["megatron.core.datasets.utils"] = _build_nothing("compile_helpers")
        sys.meta_path.append(_HelpersFinder(wheel))
    for name, patch in patches.items():
        when_imported(name, patch)
    if importlib.util.find_spec("triton") is None:
        for name in NEED_TRITON:
            when_imported(name, lambda module: None, during=_triton_named)


class _HelpersFinder:
    """Fallback finder for a clone with an unbuilt ``helpers.cpp``: it loads the wheel's library."""

    def __init__(self, library: Path) -> None:
        self._library = library

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != HELPERS:
            return None
        return importlib.util.spec_from_file_location(name, self._library)


def _helpers_of_the_wheel() -> Path | None:
    try:
        files = importlib.metadata.files("megatron-core") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    libraries = [Path(str(file.locate())) for file in files if file.name.startswith("helpers_cpp.")]
    return libraries[0] if libraries else None


class _Named(ModuleType):
    """Dummy module that lets kernels be defined without triton: every name is a decorator."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args and callable(args[0]) else self


@contextmanager
def _triton_named() -> Iterator[None]:
    """Provide the names only while one of ``NEED_TRITON`` is executed: no other code may detect
    triton."""
    names = {"triton": _Named("triton"), "triton.language": _Named("triton.language")}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)


def _build_nothing(function: str) -> Callable[[ModuleType], None]:
    def patch(module: ModuleType) -> None:
        setattr(module, function, lambda *_, **__: None)

    return patch


def _allow_sequence_parallel(module: ModuleType) -> None:
    """Mark torch's norms so that Megatron sums their gradients over the TP group."""
    wrapper = module.WrappedTorchNorm
    build = wrapper.__new__

    def marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return build(cls, config, *args, **kwargs)
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = build(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    wrapper.__new__ = marked


def _name_missing_product(module: ModuleType) -> None:
    """Define the name of TransformerEngine's product, which core 0.16 reads even if that is
    missing."""
    vars(module).setdefault("te_general_gemm", None)


def _hold_what_is_sent(module: ModuleType) -> None:
    """Retain outputs while gloo may still send them.

    Megatron frees an output right after issuing its send, which is safe on a device, where the
    stream orders both; gloo's threads read the memory later, and would send whatever has replaced
    it.
    """
    free = getattr(module, "deallocate_output_tensor", None)
    if free is None:
        return
    sent: deque[Any] = deque(maxlen=_MOST_IN_FLIGHT)

    def retain_and_free(out: Any, *args: Any, **kwargs: Any) -> None:
        if hasattr(out, "detach"):
            sent.append(out.detach())
        free(out, *args, **kwargs)

    setattr(module, "deallocate_output_tensor", retain_and_free)  # noqa: B010


def _quantize_nothing(module: ModuleType) -> None:
    """Skip quantization of an empty list of fp8 weights by the distributed optimizer in bf16.

    Without TransformerEngine, core 0.12 rejects even the empty list.
    """
    quantize = getattr(module, "_quantize_param_shard_impl", None)
    if quantize is None:
        return

    def quantized(model_params: Any, *args: Any, **kwargs: Any) -> Any:
        return quantize(model_params, *args, **kwargs) if model_params else None

    setattr(module, "_quantize_param_shard_impl", quantized)  # noqa: B010


def _list_splits(module: ModuleType) -> None:
    """Convert sizes of an exchange to numbers only if Megatron moves them from a device."""
    move = getattr(module, "maybe_move_tensor_to_cpu", None)
    if move is None:
        return

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        value = move(tensor, as_numpy=as_numpy, record_stream=record_stream)
        return value.numpy() if as_numpy and hasattr(value, "numpy") else value

    setattr(module, "maybe_move_tensor_to_cpu", moved)  # noqa: B010


def _is_not_about_shared_state(record: logging.LogRecord) -> bool:
    """Filter Megatron's warning that the CPU's random state moves with the device's: here they are
    one."""
    return "CPU RNG state changed" not in record.getMessage()
