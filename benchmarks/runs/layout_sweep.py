"""Many layouts of the recipe one after the other in one launch, for ``cpu_choice.py``.

    torchrun --standalone --nproc-per-node 2 benchmarks/runs/layout_sweep.py CASES ROWS STEPS

``CASES`` is a JSON list of lists of the recipe's options; a line of JSON is written to ``ROWS`` as
each is done.  Starting Python takes longer than a dozen steps, and layouts that run within the same
minutes are compared under the same machine load.  Model, optimizer, schedule, loop and log are the
recipe's own; only the start of the process is shared.
"""

from __future__ import annotations

import gc
import io
import json
import os
import statistics
import sys
from contextlib import redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import pretrain_gpt as recipe
import torch.distributed as dist
from gpt_arguments import fit_to_world, parse_args
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import distributed_c10d

from forerun.benchmarks.runs.launches import step_times_s

SKIPPED = 3
"""First steps of a layout, not counted because of allocations and gloo's first connections."""


def main() -> None:
    """Run the cases in order."""
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    out, steps = Path(sys.argv[2]), int(sys.argv[3])
    recipe.initialize(parse_args([]))
    for options in cases:
        end_groups()
        text = trained([*options, "--train-iters", str(SKIPPED + steps), "--log-interval", "1"])
        times_s = step_times_s(text)[SKIPPED:]
        if times_s:  # only the last rank prints
            row = {"options": options, "step_s": statistics.median(times_s), "steps_s": times_s}
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        dist.barrier()
    dist.destroy_process_group()


def end_groups() -> None:
    """End the groups of the previous layout, which Megatron does not clean up: their threads would
    slow every later layout, by 2.7 times in the mean of 66 layouts."""
    parallel_state.destroy_model_parallel()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def trained(argv: list[str]) -> str:
    """Return the recipe's output for a run with these options."""
    args = parse_args(argv)
    args.use_cpu_initialization = True
    fit_to_world(args, int(os.environ["WORLD_SIZE"]))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        create_gloo_process_groups=True,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    text = io.StringIO()
    with redirect_stdout(text):
        chunks, optimizer, scheduler, _ = recipe.build(args)
        recipe.Trainer(args, chunks, optimizer, scheduler).run(0)
    del chunks, optimizer, scheduler
    gc.collect()
    return text.getvalue()


if __name__ == "__main__":
    main()
