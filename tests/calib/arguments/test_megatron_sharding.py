"""FSDP and widths of optimizer states, by Megatron's own rules (core_v0.16.1)."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.calib.arguments.megatron_args import rewrite_command
from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.arguments.megatron_namespace import from_namespace
from forerun.calib.arguments.megatron_values import layout_values
from forerun.calib.errors import ConfigError
from forerun.calib.workload.config import RunConfig, Sharding

SIZES = {
    **{"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128},
    **{"vocab_size": 512, "micro_batch_size": 1, "world_size": 8, "bf16": True},
}


def run(**values: Any) -> RunConfig:
    return from_namespace(SimpleNamespace(**SIZES, **values))


@pytest.mark.parametrize(
    ("strategy", "sharded"),
    [
        ("no_shard", Sharding.NONE),
        ("optim", Sharding.OPTIMIZER),
        ("optim_grads", Sharding.GRADS),
        ("optim_grads_params", Sharding.WEIGHTS),
    ],
)
@pytest.mark.parametrize("switch", ["use_megatron_fsdp", "use_custom_fsdp"])
def test_megatrons_fsdp_shards_as_its_strategy_says(
    switch: str, strategy: str, sharded: Sharding
) -> None:
    config = run(**{switch: True, "data_parallel_sharding_strategy": strategy})
    assert config.parallelism.sharded is sharded and not config.unmodelled


def test_a_strategy_without_fsdp_says_nothing_and_an_unknown_one_is_refused() -> None:
    plain = run(data_parallel_sharding_strategy="optim_grads_params", use_distributed_optimizer=1)
    assert plain.parallelism.sharded is Sharding.OPTIMIZER
    with pytest.raises(ConfigError, match="'all' is not known; choose from no_shard"):
        run(use_megatron_fsdp=True, data_parallel_sharding_strategy="all")


def test_torchs_fsdp2_overlaps_by_itself_and_may_keep_what_it_gathered() -> None:
    par = run(use_torch_fsdp2=True).parallelism
    assert par.shards_weights and par.regathers_weights
    assert par.overlaps_grad_reduce and par.overlaps_param_gather
    resident = run(use_torch_fsdp2=True, torch_fsdp2_reshard_after_forward=False).parallelism
    assert resident.shards_weights and not resident.regathers_weights


def test_states_of_the_precision_aware_optimizer_are_as_wide_as_they_are_told() -> None:
    assert run(exp_avg_dtype="bf16").optimizer_state_nbytes == 0
    # 16 bits of each weight stay in its bf16 copy: 2 + 4 + 4, or 2 + 2 + 2 with moments in bf16.
    assert run(use_precision_aware_optimizer=True).optimizer_state_nbytes == 10
    narrow = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    assert run(use_precision_aware_optimizer=True, **narrow).optimizer_state_nbytes == 6
    with pytest.raises(ConfigError, match="--exp-avg-dtype 'int3' is not known"):
        run(use_precision_aware_optimizer=True, exp_avg_dtype="int3")


@pytest.mark.parametrize("recipe", ["none", "delayed", "tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("offloads", [False, True])
def test_whole_fp32_weights_are_kept_where_megatron_keeps_them(recipe: str, offloads: bool) -> None:
    """Megatron's core says who holds them; with blockwise fp8 a rank of 8 H20s (Qwen3-14B, tp 4)
    needed more than with bf16, for which ms-swift's fp8 example is known."""
    config = pytest.importorskip("megatron.core.optimizer.optimizer_config").OptimizerConfig
    theirs = config.__new__(config)
    for name, field in config.__dataclass_fields__.items():
        setattr(theirs, name, field.default)
    theirs.use_precision_aware_optimizer = theirs.use_distributed_optimizer = True
    theirs.optimizer_cpu_offload = offloads
    theirs.fp8_recipe = None if recipe == "none" else recipe
    theirs.reuse_grad_buf_for_mxfp8_param_ag = True
    with suppress(RuntimeError, TypeError):  # it then asks for Transformer Engine
        theirs.__post_init__()
    fp8 = {} if recipe == "none" else {"fp8": "e4m3", "fp8_recipe": recipe}
    ours = run(use_precision_aware_optimizer=True, optimizer_cpu_offload=offloads, **fp8)
    is_optimizers = theirs.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    assert ours.optimizer_state_nbytes == 4 + 4 + (2 if is_optimizers else 4)
    assert from_namespace(SimpleNamespace(**{**SIZES, **fp8, **layout_values(ours)})) == ours


def test_an_offloaded_optimizer_keeps_its_share_on_the_host() -> None:
    assert run(optimizer_cpu_offload=True).optimizer_offload_frac == 1.0
    half = run(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    assert half.optimizer_offload_frac == 0.5 and not half.unmodelled
    overlapped = run(optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True)
    assert overlapped.overlaps_optimizer_offload and not half.overlaps_optimizer_offload


def test_a_layout_under_fsdp2_is_asked_for_in_the_words_of_the_user() -> None:
    """A distributed optimizer beside FSDP2 is what Megatron refuses."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()][:6]
    host = ["torchrun", "--nproc-per-node=8", "t.py", *options]
    host += ["--global-batch-size=8", "--bf16", "--use-torch-fsdp2"]
    config = config_from_command(host).config
    assert config.parallelism.shards_weights
    assert rewrite_command(host[2:], config) == tuple(host[2:])


@pytest.mark.parametrize(
    ("main", "sent", "is_narrow", "unmodelled"),
    [
        ("fp32", "fp32", False, False),
        ("fp32", "auto", False, False),
        ("bf16", "bf16", True, False),
        ("torch.bfloat16", "auto", True, False),
        ("fp32", "bf16", False, True),
        ("auto", "bf16", False, True),
        ("auto", "auto", False, False),
    ],
)
def test_fsdp_keeps_and_reduces_gradients_as_wide_as_it_is_told(
    main: str, sent: str, is_narrow: bool, unmodelled: bool
) -> None:
    names = {"megatron_fsdp_main_grads_dtype": main, "megatron_fsdp_grad_comm_dtype": sent}
    config = run(use_megatron_fsdp=True, **names)
    assert config.reduces_grads_in_bf16 is is_narrow
    assert ("megatron_fsdp_grad_comm_dtype" in config.unmodelled) is unmodelled
    without = run(**names)
    assert not without.reduces_grads_in_bf16 and not without.unmodelled


def test_a_schedule_of_batch_sizes_is_the_batch() -> None:
    """As in Megatron, which takes it beside no ``--global-batch-size``."""
    config = run(step_batch_size_schedule="0:384 200B:768 400B:1152", global_batch_size=None)
    assert config.batch.global_batch_size == 1152
    assert config.cadence.step_batch_size_schedule == "0:384 200B:768 400B:1152"
    assert "global_batch_size" not in layout_values(config)
