"""Bytes of one element, by the names that frameworks and their tables give to types."""

from __future__ import annotations

MICROSECOND_S = 1e-6
_NBYTES = {
    **dict.fromkeys(("fp64", "float64", "double", "int64"), 8),
    **dict.fromkeys(("fp32", "float32", "float", "tf32", "int32"), 4),
    **dict.fromkeys(("fp16", "float16", "half", "bf16", "bfloat16"), 2),
    **dict.fromkeys(("fp8", "float8", "int8", "nvfp4", "fp4"), 1),
}


def element_nbytes(name: str, default: int = 2) -> int:
    """Bytes of an element (at least 1) of a type, ``default`` where its name is not known.

    >>> [element_nbytes(name) for name in ("bfloat16", "fp8_block", "torch.float32")]
    [2, 1, 4]
    """
    return _NBYTES.get(name.lower().removeprefix("torch.").split("_")[0], default)
