"""Sizes of the model that kernels do not like, where they may still be chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..workload.config import Fp8Recipe, RunConfig
from .rule import Harm, Remedy, StatedRule
from .stated_launch import StatedLaunch

_LOADS = ("--load", "--finetune", "--pretrained-checkpoint", "--use-checkpoint-args")
"""Of a model that is there already, sizes are what they are."""
_ROW_NBYTES = 16
"""Rows of what tensor cores multiply should be multiples of (NVIDIA, Matrix Multiplication
Background, section 2)."""
_USUAL_ROWS = 128
"""Megatron's own default of ``--make-vocab-size-divisible-by``."""
_HEAD_MULTIPLE = 8
"""Of the size of a head: what flash and fused attention take."""
_SAMPLED = "samples of a run have no other size, and no law says what such rows cost"


def _multiple(config: RunConfig) -> int:
    """Elements of a row that is aligned: 8 of 16 bits, 16 of 8 bits."""
    return _ROW_NBYTES // (2 if config.fp8 is Fp8Recipe.NONE else 1)


def _vocabulary(launch: StatedLaunch) -> Iterator[Remedy]:
    config, tp = launch.config, launch.config.parallelism.tp
    option, rows = "--make-vocab-size-divisible-by", launch.config.model.vocab_size
    is_even = rows // tp % _multiple(config) == 0
    if is_even or not launch.is_on_gpu or launch.says(*_LOADS):
        return
    multiple = _USUAL_ROWS * tp
    padded = -(-(launch.number("--vocab-size") or rows) // multiple) * multiple
    yield Remedy(
        what=f"{rows // tp} rows of the vocabulary on a rank",
        put=((option, str(_USUAL_ROWS)),),
        layout=replace(config, model=replace(config.model, vocab_size=padded)),
    )


def _width(launch: StatedLaunch) -> Iterator[Remedy]:
    config, tp = launch.config, launch.config.parallelism.tp
    option, width = "--ffn-hidden-size", launch.config.model.ffn_hidden_size
    each = _multiple(config) * tp
    if width % each == 0 or not launch.is_on_gpu or launch.says(*_LOADS):
        return
    if launch.says(option):
        wider = -(-width // each) * each
        yield Remedy(what=launch.written(option), put=((option, str(wider)),))


def _head_size(launch: StatedLaunch) -> Iterator[Remedy]:
    model, option = launch.config.model, "--kv-channels"
    size = model.kv_channels
    if model.latent_attention is not None or size % _HEAD_MULTIPLE == 0:
        return
    if launch.has_engine and not launch.says(*_LOADS):
        larger = -(-size // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
        yield Remedy(what=f"a head of {size}", put=((option, str(larger)),))


RULES = (
    StatedRule(
        name="vocabulary",
        harm=Harm.WASTES,
        when=(
            "rows of the vocabulary on a rank that are not a multiple of 16 bytes, trained from "
            "the start"
        ),
        why=(
            "tensor cores need rows of a multiple of 16 bytes, and logits and loss are computed on "
            "these"
        ),
        source="megatron/training/tokenizer/tokenizer.py",
        unpriced=_SAMPLED,
        find=_vocabulary,
    ),
    StatedRule(
        name="ffn-width",
        harm=Harm.WASTES,
        when=(
            "`--ffn-hidden-size` over tp that is not a multiple of 16 bytes, trained from the start"
        ),
        why="tensor cores need rows of a multiple of 16 bytes",
        source="NVIDIA: Matrix Multiplication Background, section 2",
        unpriced=_SAMPLED,
        find=_width,
    ),
    StatedRule(
        name="head-size",
        harm=Harm.RISKS,
        when="a head that is not a multiple of 8, trained from the start",
        why="flash and fused attention take multiples of 8; any other runs unfused, or not at all",
        source="megatron/core/transformer/transformer_config.py",
        unpriced="the model takes attention to be fused",
        find=_head_size,
    ),
)
