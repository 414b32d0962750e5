"""Roles of the groups that DTensors are spread over, on a mesh of four ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from forerun.calib.workload.collectives import GroupRole
from forerun.hooks.session.chain import roles_in


@pytest.fixture
def four_ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    torch.distributed.destroy_process_group()


def test_a_group_has_the_role_that_the_mesh_of_a_weight_names(four_ranks: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("mine", "tp"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    weight = distribute_tensor(torch.zeros(4, 4), mesh["tp"], [Shard(0)])
    model[0].weight = nn.Parameter(weight)
    named = {mesh.get_group("tp").group_name: GroupRole.TP}
    assert roles_in([model]) == named
    model[1].weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)] * 2))
    assert roles_in([model]) == named
