"""A node leaves an elastic launch: the rest goes on with fewer ranks, with us as without us.

The meeting of the ranks that are left is torchrun's own, and has no other form.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from forerun.calib.samples.store import read_run, run_ids

pytestmark = pytest.mark.slow

NUM_STEPS, LEAVES_AT, SAVED_EVERY = 40, 25, 10
PROGRAM = f"""
import json, os, signal, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
first = 0
if os.path.exists("saved.json"):
    with open("saved.json") as file:
        saved = json.load(file)
    model.load_state_dict({{name: torch.tensor(held) for name, held in saved["model"].items()}})
    first = saved["step"]
world = dist.get_world_size()
for step in range(first, {NUM_STEPS}):
    if world == 2 and os.environ["NODE"] == "1" and step == {LEAVES_AT}:
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
    loss = model(torch.randn(16, 64, generator=torch.Generator().manual_seed(step))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print("LOSS", step, world, loss.item().hex(), flush=True)
        if (step + 1) % {SAVED_EVERY} == 0:
            held = {{name: values.tolist() for name, values in model.state_dict().items()}}
            with open("saved.part", "w") as file:
                json.dump({{"model": held, "step": step + 1}}, file)
            os.replace("saved.part", "saved.json")
    time.sleep(0.02)
dist.destroy_process_group()
"""
CALIBRATE = ("--calibrate", "--calibrate-steps=4", "--calibrate-every=8", "--calibrate-dir=out")


def agent(folder: Path, node: int, port: int, *arguments: str) -> subprocess.Popen[str]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1")
    meeting = (f"--rdzv-endpoint=localhost:{port}", "--rdzv-backend=c10d", "--rdzv-id=elastic")
    # On a busy machine one node has imported torch long before the other.
    patience = "last_call_timeout=15,keep_alive_interval=1"
    options = (f"--rdzv-conf={patience},is_host=False", "--max-restarts=3")
    inherited = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    return subprocess.Popen(
        [*launcher, *meeting, *options, "train.py", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**inherited, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "NODE": str(node)},
    )


def launch(folder: Path, *arguments: str) -> tuple[list[str], list[int], str]:
    """Losses of both nodes in order, exit statuses, and what was printed."""
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    # The nodes meet here: no port is free for a moment, and it outlives the one that leaves.
    meeting = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    agents = [agent(folder, node, meeting.port, *arguments) for node in range(2)]
    output = "".join(each.communicate(timeout=240)[0] for each in agents)
    return re.findall(r"^LOSS .+$", output, re.MULTILINE), [a.returncode for a in agents], output


def test_a_node_that_leaves_costs_what_it_costs_without_us(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:  # most of a launch is waiting for torch's rendezvous
        twins = [
            pool.submit(launch, tmp_path / "bare"),
            pool.submit(launch, tmp_path / "ours", *CALIBRATE),
        ]
        (bare, statuses, bare_output), (ours, ours_statuses, our_output) = (
            t.result() for t in twins
        )
    worlds = [line.split()[2] for line in bare]
    assert worlds == ["2"] * LEAVES_AT + ["1"] * (NUM_STEPS - 20), bare_output[-3000:]
    assert ours == bare, our_output[-3000:]
    assert sorted(map(bool, ours_statuses)) == sorted(map(bool, statuses))
    names = run_ids(tmp_path / "ours" / "out")
    assert [name.rpartition("-w")[2] for name in names] == ["2", "1"]
    sizes = [read_run(tmp_path / "ours" / "out", name).headers for name in names]
    assert [len(headers) for headers in sizes] == [2, 1]
