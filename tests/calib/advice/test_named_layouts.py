"""Layouts by name: what a plan prints is read back, short names change the running layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from every_layout import every_layout

from forerun.calib.advice.named_layouts import named_layout
from forerun.calib.workload.choices import layout_label
from forerun.calib.workload.config import Precision, Recompute, RunConfig, Sharding

Layout = Callable[..., RunConfig]
SHARDED = {"is_optimizer_distributed": True, "overlaps_grad_reduce": True, "ranks_per_node": 4}
SHARDED["overlaps_param_gather"] = True


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "NVIDIA H100 80GB HBM3"])
@pytest.mark.parametrize("par", [{}, SHARDED, SHARDED | {"is_sequence_parallel": True}])
def test_the_label_of_every_layout_is_read_back(
    layout: Layout, par: dict[str, bool], device: str
) -> None:
    settings = {"device": device, "precision": Precision.BF16}
    running = layout(tp=2, dp=4, samples=32, par=par, model={"num_layers": 6}, **settings)
    for config in every_layout(running, 8)[::17]:
        result = named_layout(layout_label(config), running)
        assert layout_label(result) == layout_label(config)
        assert result.batch == config.batch
        # With one replica nothing is sharded, and a label leaves sharding out.
        if config.parallelism.dp > 1 and device != "cpu":
            assert result == config
        elif config.parallelism.dp > 1:
            assert without_overlaps(result) == without_overlaps(config)


def without_overlaps(config: RunConfig) -> RunConfig:
    """On a CPU, where nothing overlaps, no label says them."""
    unsaid = ("overlaps_grad_reduce", "overlaps_param_gather")
    parallelism = replace(config.parallelism, **dict.fromkeys(unsaid, False))
    return replace(config, parallelism=parallelism)


def test_labels_tell_apart_what_differs_in_overlaps_alone(layout: Layout) -> None:
    settings = {"device": "NVIDIA H100 80GB HBM3", "precision": Precision.BF16}
    running = layout(dp=4, samples=32, par=SHARDED, **settings)

    def label(**changes: bool) -> str:
        return layout_label(replace(running, parallelism=replace(running.parallelism, **changes)))

    assert layout_label(running) == "DP4 ZeRO1 mbs2"
    assert label(overlaps_param_gather=False) == "DP4 ZeRO1 gradOverlap mbs2"
    nothing = {"overlaps_grad_reduce": False, "overlaps_param_gather": False}
    assert label(**nothing) == "DP4 ZeRO1 noOverlap mbs2"
    assert label(**nothing, is_optimizer_distributed=False) == "DP4 noOverlap mbs2"
    assert label(overlaps_param_gather=False, is_optimizer_distributed=False) == "DP4 mbs2"
    away = replace(running, optimizer_offload_frac=1.0)
    assert layout_label(away).endswith("mbs2 offload:100")
    overlapped = replace(away, overlaps_optimizer_offload=True)
    assert layout_label(overlapped).endswith("mbs2 offload:100+overlap")
    assert named_layout(layout_label(overlapped), running) == overlapped
    staged = layout(pp=4, model={"num_layers": 8}, par={"vp": 2, "overlaps_p2p": False}, **settings)
    assert layout_label(staged) == "PP4 VP2 noP2P mbs2"
    assert named_layout("PP4 VP2 noP2P mbs2", staged) == staged
    assert layout_label(named_layout("PP4 VP2 mbs2", staged)) == "PP4 VP2 mbs2"
    assert not named_layout("nooverlap", running).parallelism.overlaps_param_gather


def test_small_letters_change_the_running_layout(layout: Layout) -> None:
    running = layout(tp=2, dp=4, micro=1, samples=32, recompute=Recompute.FULL, par=SHARDED)
    config = named_layout("pp2, mbs=2", running)
    assert layout_label(config) == "TP2 PP2 DP2 ZeRO1 mbs2 full"
    assert named_layout("running", running) == running
    assert named_layout("dp8", running).parallelism.num_ranks == 16
    assert named_layout("tp4", running, 16).parallelism.dp == 4
    assert named_layout("none", running).recompute is Recompute.NONE
    whole = named_layout("PP2 DP4 mbs1", running)
    assert layout_label(whole) == "PP2 DP4 mbs1"
    assert layout_label(named_layout("pp2 vpp2 selective+mlp", running)).endswith("selective+mlp")


@pytest.mark.parametrize(
    ("words", "sharding"),
    [
        (("zero0", "ddp"), Sharding.NONE),
        (("zero1", "ZeRO1", "zero1x2"), Sharding.OPTIMIZER),
        (("zero2", "ZeRO2"), Sharding.GRADS),
        (("zero3", "fsdp", "FSDP", "hsdp"), Sharding.WEIGHTS),
    ],
)
def test_each_stage_of_zero_is_a_word(
    layout: Layout, words: tuple[str, ...], sharding: Sharding
) -> None:
    for word in words:
        result = named_layout(word, layout(dp=8, samples=32)).parallelism
        assert result.sharded is sharding
        is_copied = word in ("zero1x2", "hsdp")
        assert result.num_optimizer_instances == (2 if is_copied else 1)
