from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from forerun.calib.errors import ConfigError
from forerun.calib.memory.layout_table import LayoutMemory
from forerun.calib.memory.peak import memory
from forerun.calib.workload.config import (
    Batch,
    Experts,
    Precision,
    Recompute,
    RunConfig,
    Sharding,
)
from forerun.calib.workload.pipeline_layout import uneven_layers

Layout = Callable[..., RunConfig]
CHOICES = (
    {},
    {"recompute": Recompute.FULL, "recompute_num_layers": 1},
    {"recompute": Recompute.FULL, "recompute_span": 2},
    {"recompute": Recompute.SELECTIVE, "recompute_modules": ("mlp", "moe_act")},
)
EXPERTS = Experts(
    num_experts=4, ffn_hidden_size=64, layer_pattern=(False,) + (True,) * 7, is_grouped=True
)


def peaks_nbytes(layouts: Sequence[RunConfig]) -> NDArray[np.float64]:
    allocated, overhead = LayoutMemory().needed_nbytes(layouts)
    return allocated + overhead


def layouts(base: RunConfig) -> list[RunConfig]:
    """Every combination of a few degrees that can run."""
    configs: list[RunConfig] = []
    degrees = product((1, 2), (1, 2, 4), (1, 2), (1, 2), (1, 2), (1, 2), (1, 4), CHOICES)
    for tp, pp, vp, dp, cp, ep, micro, choice in degrees:
        try:
            config = replace(
                base,
                parallelism=replace(
                    base.parallelism,
                    **{"tp": tp, "pp": pp, "vp": vp, "dp": dp, "cp": cp, "ep": ep},
                    is_sequence_parallel=tp > 1,
                ),
                batch=Batch(micro_batch_size=micro, global_batch_size=64),
                **choice,
            )
        except ConfigError:
            continue
        configs.append(config)
    return configs


@pytest.mark.parametrize("device", ["cpu", "H100"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_every_entry_is_that_of_the_layout_alone(
    layout: Layout, device: str, is_tied: bool
) -> None:
    base = layout(
        samples=64,
        model={"num_layers": 8, "experts": EXPERTS, "is_tied": is_tied},
        par={"is_optimizer_distributed": True},
        precision=Precision.BF16,
        device=device,
    )
    configs = layouts(base)
    configs += [
        replace(one, optimizer_offload_frac=1.0) for one in configs if one.parallelism.dp > 1
    ]
    assert len(configs) > 300
    alone = [memory(config).total_nbytes for config in configs]
    assert peaks_nbytes(configs) == pytest.approx(alone, abs=4)


@pytest.mark.parametrize("sharding", list(Sharding))
def test_sharded_layouts_equal_those_alone(layout: Layout, sharding: Sharding) -> None:
    par = {"is_optimizer_distributed": True, "sharding": sharding}
    model = {"num_layers": 8, "experts": EXPERTS}
    base = layout(samples=64, model=model, par=par, precision=Precision.BF16, device="H100")
    configs = layouts(base)[::7]
    configs += [
        replace(one, parallelism=replace(one.parallelism, regathers_weights=False))
        for one in configs
    ]
    alone = [memory(config).total_nbytes for config in configs]
    assert peaks_nbytes(configs) == pytest.approx(alone, abs=4)


def test_stages_that_do_not_split_evenly_equal_those_alone(layout: Layout) -> None:
    model = {"num_layers": 7, "experts": replace(EXPERTS, layer_pattern=(False,) + (True,) * 6)}
    for pp, recompute in product((2, 4), (Recompute.NONE, Recompute.FULL)):
        par = {"chunk_layers": uneven_layers(7, pp)}
        base = layout(pp=pp, dp=2, model=model, par=par, recompute=recompute, device="B200")
        assert peaks_nbytes([base])[0] == pytest.approx(memory(base).total_nbytes, abs=4)


def test_chunks_of_a_layout_of_its_own_equal_those_alone(layout: Layout) -> None:
    par = {"chunk_layers": (1, 2, 2, 1), "vp": 2}
    base = layout(pp=2, dp=2, samples=16, model={"num_layers": 6}, par=par, device="B200")
    assert peaks_nbytes([base])[0] == pytest.approx(memory(base).total_nbytes, abs=4)
