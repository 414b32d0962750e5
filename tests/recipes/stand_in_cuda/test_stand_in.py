"""The CPU stand-in, each time in a process of its own: it changes torch for good."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from forerun.recipes.stand_in_cuda import megatron as stand_in_megatron

LOOK = """
import json, torch, warnings
torch.manual_seed(3)
drawn = torch.rand(4).tolist()
from forerun.recipes.stand_in_cuda import install as stand_in
stand_in.install()
stand_in.install()
torch.cuda.manual_seed(3)
state = torch.cuda.get_rng_state()
again = torch.rand(4).tolist()
torch.cuda.set_rng_state(state)
third = torch.dropout(torch.ones(64, device="cuda"), 0.5, True)
torch.cuda.set_rng_state(state)
fourth = torch.dropout(torch.ones(64, device="cuda"), 0.5, True)

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x
    @staticmethod
    def backward(ctx, grad):
        return grad * torch.full((), 2.0, device=torch.device("cuda", 0))

grads = []
for run in (lambda y: y.backward(), lambda y: torch.autograd.backward([y]), None):
    x = torch.ones(3, requires_grad=True)
    y = Doubled.apply(x).sum()
    grads.append((torch.autograd.grad(y, x)[0] if run is None else (run(y), x.grad)[1]).tolist())

begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
with torch.cuda.stream(torch.cuda.Stream()):
    begin.record()
    end.record(torch.cuda.current_stream())
store = torch.distributed.HashStore()
torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
group = torch.distributed.new_group([0], backend="nccl")
total = torch.ones(2, device="cuda")
torch.distributed.all_reduce(total, group=group)
before = torch.get_rng_state()
with warnings.catch_warnings():  # pages are not pinned, and nothing is said of it
    warnings.simplefilter("error")
    list(torch.utils.data.DataLoader([1, 2], shuffle=False, pin_memory=True))
is_apart = torch.equal(before, torch.get_rng_state())
def step(x):
    return x + 1
print(json.dumps({
    "same_draw": drawn == again, "same_dropout": torch.equal(third, fourth), "grads": grads,
    "devices": [str(t.device) for t in (
        torch.zeros(1, device="cuda:0"), torch.ones(1).to("cuda"), torch.ones(1).to(device="cuda"),
        torch.ones(1).cuda(), torch.nn.Linear(1, 1).to("cuda").weight, torch.tensor([1], device=0),
        torch.empty(1, device=torch.cuda.current_device(), pin_memory=True))],
    "types": [torch.ones(1).type(), torch.ones(1).type("torch.cuda.HalfTensor").type()],
    "is_ordered": begin.elapsed_time(end) >= 0, "backend": torch.distributed.get_backend(group),
    "total": total.tolist(), "is_eager": torch.compile(step) is step,
    "is_loader_apart": is_apart, "is_available": torch.cuda.is_available(),
    "count": torch.cuda.device_count(),
}))
torch.distributed.destroy_process_group()
"""

WRAPPED = """
import json, torch
from forerun.recipes.stand_in_cuda import install as stand_in
stand_in.install()
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

store, device = dist.HashStore(), torch.device("cuda", 0)
dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
ways = {
    "bare": lambda model: model,
    "ddp by number": lambda model: DistributedDataParallel(model, device_ids=[0], output_device=0),
    "ddp by device": lambda model: DistributedDataParallel(model, [device]),
    "fsdp1": FullyShardedDataParallel,
    "fsdp1 by number": lambda model: FullyShardedDataParallel(model, device_id=0),
    "fsdp1 by device": lambda model: FullyShardedDataParallel(model, device_id=device),
    "fsdp1 here": lambda model: FullyShardedDataParallel(
        model, device_id=torch.cuda.current_device()),
    "fsdp2": fully_shard,
    "fsdp2 by name": lambda model: fully_shard(model, mesh=init_device_mesh("cuda", (1,))),
    "fsdp2 over a group": lambda model: fully_shard(
        model, mesh=DeviceMesh.from_group(dist.group.WORLD, "cuda")),
}
losses = {}
for name, wrap in ways.items():
    torch.manual_seed(1)
    model = wrap(torch.nn.Linear(4, 1).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses[name] = []
    for _ in range(3):
        loss = model(torch.ones(2, 4, device=device)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[name].append(loss.item())
print(json.dumps(losses))
dist.destroy_process_group()
"""


def python(code: str, cwd: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=cwd, text=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_cpu_answers_for_cuda(tmp_path: Path) -> None:
    message, line = python(LOOK, tmp_path)
    seen = json.loads(line)
    assert message.startswith("[forerun] CPU stand-in: ")
    assert set(seen.pop("devices")) == {"cpu"}
    assert seen.pop("grads") == [[2.0, 2.0, 2.0]] * 3
    assert seen == {
        "same_draw": True,
        "same_dropout": True,
        "types": ["torch.cuda.FloatTensor", "torch.cuda.HalfTensor"],
        "is_ordered": True,
        "backend": "gloo",
        "total": [1.0, 1.0],
        "is_eager": True,
        "is_loader_apart": True,
        "is_available": True,
        "count": 1,
    }


@pytest.mark.slow
def test_a_model_wrapped_for_gpus_trains_as_the_bare_one(tmp_path: Path) -> None:
    """Numbers of devices and meshes of CUDA name the CPU, whatever parameters lie on."""
    *_, line = python(WRAPPED, tmp_path)
    losses = json.loads(line)
    bare = losses.pop("bare")
    assert bare[0] > bare[1] > bare[2]
    assert losses == {name: pytest.approx(bare) for name in losses} and len(losses) == 9


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs the wheel of megatron-core"
)
def test_an_unbuilt_clone_uses_the_helpers_of_the_wheel(tmp_path: Path) -> None:
    datasets = tmp_path / "megatron" / "core" / "datasets"
    datasets.mkdir(parents=True)
    for folder in (datasets.parent, datasets):
        (folder / "__init__.py").write_text("")
    (datasets / "utils.py").write_text("def compile_helpers():\n    raise SystemExit('no make')\n")
    *_, line = python(
        "from forerun.recipes.stand_in_cuda import install as stand_in\n"
        "stand_in.install()\n"
        "from megatron.core.datasets import helpers_cpp, utils\n"
        "import megatron.core, numpy\n"
        "utils.compile_helpers()\n"
        "index, sample = numpy.zeros(4, numpy.int16), numpy.zeros(4, numpy.int64)\n"
        "helpers_cpp.build_blending_indices(index, sample, numpy.array([0.5, 0.5]), 2, 4, False)\n"
        "print(megatron.core.__file__, index.tolist())\n",
        tmp_path,
    )
    assert line == f"{datasets.parent / '__init__.py'} [0, 1, 0, 1]"


def test_what_was_sent_lives_on_when_megatron_frees_it() -> None:
    """gloo reads a tensor after ``isend`` returned: its memory must not be given away."""
    schedules = ModuleType("schedules")

    def free(out: torch.Tensor) -> None:
        out.data = torch.empty(1)

    vars(schedules)["deallocate_output_tensor"] = free
    stand_in_megatron._hold_what_is_sent(schedules)
    out = torch.full((100_003,), 7.0)
    place = out.data_ptr()
    vars(schedules)["deallocate_output_tensor"](out)
    assert out.numel() == 1
    others = [torch.zeros(100_003) for _ in range(8)]
    assert all(other.data_ptr() != place for other in others)
