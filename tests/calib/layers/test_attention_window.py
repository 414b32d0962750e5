"""Windows and chunks of attention: which layers have them, and the scores that remain."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.arguments.hugging_face import from_hugging_face
from forerun.calib.arguments.hugging_face_shape import notes_of_keys
from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.errors import ConfigError
from forerun.calib.workload.config import Attention, RunConfig
from forerun.calib.workload.model_shape import AttentionWindow
from forerun.launch.known.machine_fits import device_machine

LINE = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 24 --hidden-size 4096 "
    "--num-attention-heads 32 --max-position-embeddings 32768 --vocab-size 32000 "
    "--tensor-model-parallel-size 8 --sequence-parallel --use-distributed-optimizer --bf16 "
    "--seq-length {seq} --micro-batch-size {micro} --global-batch-size {batch}"
)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "max_position_embeddings": 8192,
    "vocab_size": 32000,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}
needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed"
)


def config_of(*more: str, seq: int = 16384, micro: int = 1, batch: int = 8) -> RunConfig:
    line = LINE.format(seq=seq, micro=micro, batch=batch)
    return replace(
        config_from_command([*line.split(), *more]).config, device="NVIDIA H100 80GB HBM3"
    )


def times_s(*configs: RunConfig) -> list[float]:
    steps = device_machine(configs[0]).steps
    return [one.time_s for one in steps.estimates(configs)]


@needs_megatron
@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 70))
def test_scores_are_those_of_megatrons_mask(seq: int, width: int) -> None:
    """Its mask is True where a score is omitted."""
    utils = pytest.importorskip("megatron.core.transformer.utils")
    make, tril = utils.get_sliding_window_causal_mask, pytest.importorskip("torch").ones
    causal = int(tril(seq, seq).tril().sum())
    remaining = seq * seq - int(_on_cpu(make, seq, (width - 1, 0)).sum())
    assert AttentionWindow(width=width).scores_frac(seq) == pytest.approx(remaining / causal)


def _on_cpu(make: Any, seq: int, window: tuple[int, int]) -> Any:
    torch = pytest.importorskip("torch")
    real = torch.ones
    try:
        torch.ones = lambda *sizes, device=None, **more: real(*sizes, **more)
        return make(seq, seq, window)
    finally:
        torch.ones = real


@needs_megatron
@pytest.mark.parametrize(
    ("freq", "value"),
    [
        *((None, None), ("2", 2), ("5", 5), ("-5", -5)),
        ("[1]*20+[0]*4", [1] * 20 + [0] * 4),
        ("([1,1,1,0])*6", [1, 1, 1, 0] * 6),
    ],
)
def test_layers_are_those_that_megatron_limits(freq: str | None, value: Any) -> None:
    utils = pytest.importorskip("megatron.core.transformer.utils")
    more = ("--window-attn-skip-freq", freq) if freq else ()
    window = config_of("--window-size", "127,0", *more).model.window
    assert window is not None and window.width == 128
    theirs = [utils.is_layer_window_attention((127, 0), value, layer + 1) for layer in range(24)]
    assert theirs == list(window.layers or [True] * 24)


def test_an_endless_window_is_none_and_a_wrong_one_is_named() -> None:
    assert config_of("--window-size", "(-1,0)").model.window is None
    assert config_of("--window-size", "127,0", "--window-attn-skip-freq", "1").model.window is None
    assert not config_of("--window-size", "(127,0)").unmodelled
    with pytest.raises(ConfigError, match="--window-size 'wide' is not a whole number"):
        config_of("--window-size", "wide")
    with pytest.raises(ConfigError, match="--window-attn-skip-freq '0' is neither"):
        config_of("--window-size", "127,0", "--window-attn-skip-freq", "0")
    with pytest.raises(ConfigError, match="have 2 entries, not num_layers 24"):
        config_of("--window-size", "127,0", "--window-attn-skip-freq", "[1,0]")


def test_chunks_cost_what_as_many_short_samples_cost() -> None:
    """A query never leaves its chunk, so a sample of eight chunks is eight samples."""
    long, short = config_of(seq=16384), config_of(seq=2048, micro=8, batch=64)
    chunked = replace(
        long, model=replace(long.model, window=AttentionWindow(width=2048, is_chunked=True))
    )
    full_s, chunked_s, short_s = times_s(long, chunked, short)
    assert chunked_s == pytest.approx(short_s, rel=0.005)
    assert chunked_s < 0.85 * full_s


def test_time_lies_between_full_and_limited_by_the_layers() -> None:
    limited = config_of("--window-size", "1023,0")
    full, half, all_layers, *wide = times_s(
        config_of(),
        config_of("--window-size", "1023,0", "--window-attn-skip-freq", "2"),
        limited,
        config_of("--window-size", "16383,0"),
        config_of("--window-size", "16383,0", "--window-attn-skip-freq", "3"),
    )
    assert wide == [full, full]
    assert full - half == pytest.approx(half - all_layers, rel=1e-3)
    # Unfused attention computes all scores and masks them.
    eager, masked = times_s(
        *(replace(one, attention=Attention.UNFUSED) for one in (config_of(), limited))
    )
    assert eager == masked


FAMILIES = (
    *("gemma2", "gemma3_text", "gpt_oss", "cohere2", "olmo3", "llama4_text", "qwen2", "qwen3"),
    *("mistral", "mixtral", "phi3", "starcoder2"),
)


@pytest.mark.parametrize("kind", FAMILIES)
def test_layers_are_those_of_transformers(kind: str) -> None:
    """Files of these families may omit ``layer_types``: the family's rule gives the same."""
    mapping = pytest.importorskip("transformers").CONFIG_MAPPING
    more = {"use_sliding_window": True, "max_window_layers": 5} if kind.startswith("qwen") else {}
    config = mapping[kind](num_hidden_layers=12, **more).to_dict()
    if not config.get("sliding_window") and not config.get("attention_chunk_size"):
        config["sliding_window"] = 1024
    types = config.pop("layer_types", None) or ["sliding_attention"] * 12
    config.pop("no_rope_layers", None)
    for keys in (config, {**config, "layer_types": types}):
        window = from_hugging_face(keys).window
        assert window is not None
        assert list(window.layers or [True] * 12) == [one != "full_attention" for one in types]
        assert window.is_chunked == ("chunked_attention" in types)


def test_a_window_that_is_switched_off_or_in_no_layer_is_none() -> None:
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 1024, "max_window_layers": 24}
    assert from_hugging_face({**qwen, "use_sliding_window": False}).window is None
    assert from_hugging_face({**qwen, "use_sliding_window": True}).window is None
    assert from_hugging_face({**LLAMA, "sliding_window": None}).window is None
    hybrid = {**LLAMA, "layer_types": ["full_attention", "sliding_attention"] * 12}
    window = from_hugging_face({**hybrid, "sliding_window": 64}).window
    assert window == AttentionWindow(width=64, layers=(False, True) * 12)


def test_an_unknown_family_that_does_not_place_its_window_is_noted() -> None:
    keys = {**LLAMA, "model_type": "new", "sliding_window": 1024}
    assert from_hugging_face(keys).window is None
    _, note = notes_of_keys(keys, seq_length=8192)
    assert note.startswith("config.json names a window of 1,024 tokens but no layer_types")
    for settled in (
        {**keys, "layer_types": ["full_attention"] * 24},
        {**keys, "sliding_window_pattern": 4},
        {**keys, "use_sliding_window": False},
    ):
        assert len(notes_of_keys(settled, seq_length=8192)) == 1
