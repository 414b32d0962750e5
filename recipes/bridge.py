"""Pre-train a recipe of Megatron-Bridge; Forerun needs no change to it.

    torchrun --standalone --nproc-per-node 8 bridge.py train.train_iters=2000 --calibrate

All other words are Hydra overrides (``model.tensor_model_parallel_size=2``): the command of a
faster layout, which ``forerun plan DIR --show 1`` prints, uses them and runs unchanged.
Needs Forerun's extra ``analysis`` and Megatron-Bridge 0.3 or later, on GPUs.
"""

from __future__ import annotations

import sys

# Before the arguments are parsed: this import removes --calibrate and its options from them.
import torch
from megatron.bridge.recipes.llama import llama32_1b_pretrain_config  # <- yours
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides


def main() -> None:
    """Train to the recipe's last iteration, or until an advised and requested stop."""
    config = process_config_with_overrides(llama32_1b_pretrain_config(), cli_overrides=sys.argv[1:])
    # Without --calibrate in the launch: callbacks=[forerun.bridge_callback(steps=20)].
    pretrain(config=config, forward_step_func=forward_step)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
