from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from forerun.calib.errors import ConfigError
from forerun.calib.memory.layout_table import LayoutColumns, RecomputeChoice, memory_table
from forerun.calib.memory.layout_table import columns_of as memory_columns
from forerun.calib.memory.peak import memory
from forerun.calib.workload.config import Batch, Experts, Precision, Recompute, RunConfig
from forerun.calib.workload.uneven import uneven_layers

Layout = Callable[..., RunConfig]
CHOICES = (
    RecomputeChoice(),
    RecomputeChoice(recompute=Recompute.FULL, recompute_num_layers=1),
    RecomputeChoice(recompute=Recompute.SELECTIVE, recompute_modules=("mlp", "moe_act")),
)
EXPERTS = Experts(
    num_experts=4, ffn_hidden_size=64, layer_pattern=(False,) + (True,) * 7, is_grouped=True
)


def columns_of(configs: list[RunConfig], choices: list[int]) -> LayoutColumns:
    par = [c.parallelism for c in configs]
    names = ("tp", "pp", "vp", "dp", "cp", "ep", "etp", "is_sequence_parallel")
    return LayoutColumns(
        **{name: np.array([getattr(p, name) for p in par]) for name in names},
        micro_batch_size=np.array([c.batch.micro_batch_size for c in configs]),
        recompute=np.array(choices),
    )


def layouts(base: RunConfig) -> tuple[list[RunConfig], list[int]]:
    """Every combination of a few degrees that can run."""
    configs: list[RunConfig] = []
    chosen: list[int] = []
    degrees = product((1, 2), (1, 2, 4), (1, 2), (1, 2), (1, 2), (1, 2), (1, 4), range(3))
    for tp, pp, vp, dp, cp, ep, micro, choice in degrees:
        picked = CHOICES[choice]
        try:
            config = replace(
                base,
                parallelism=replace(
                    base.parallelism,
                    **{"tp": tp, "pp": pp, "vp": vp, "dp": dp, "cp": cp, "ep": ep},
                    is_sequence_parallel=tp > 1,
                ),
                batch=Batch(micro_batch_size=micro, global_batch_size=64),
                recompute=picked.recompute,
                recompute_num_layers=picked.recompute_num_layers,
                recompute_modules=picked.recompute_modules,
            )
        except ConfigError:
            continue
        configs.append(config)
        chosen.append(choice)
    return configs, chosen


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
    configs, chosen = layouts(base)
    assert len(configs) > 200
    table = memory_table(base, columns_of(configs, chosen), CHOICES)
    alone = [memory(config) for config in configs]
    assert table.allocated_nbytes == pytest.approx([m.allocated_nbytes for m in alone], abs=4)
    assert table.total_nbytes == pytest.approx([m.total_nbytes for m in alone], abs=4)


def test_stages_that_do_not_split_evenly_equal_those_alone(layout: Layout) -> None:
    model = {"num_layers": 7, "experts": replace(EXPERTS, layer_pattern=(False,) + (True,) * 6)}
    for pp, recompute in product((2, 4), (Recompute.NONE, Recompute.FULL)):
        par = {"chunk_layers": uneven_layers(7, pp)}
        base = layout(pp=pp, dp=2, model=model, par=par, recompute=recompute, device="B200")
        columns, choices = memory_columns([base])
        table = memory_table(base, columns, choices)
        assert table.total_nbytes[0] == pytest.approx(memory(base).total_nbytes, abs=4)


def test_uneven_virtual_stages_are_refused(layout: Layout) -> None:
    base = layout(model={"num_layers": 6})
    odd = columns_of([base], [0])
    with pytest.raises(ConfigError, match="leave such layouts out"):
        memory_table(base, replace(odd, pp=np.array([4]), vp=np.array([2])))
