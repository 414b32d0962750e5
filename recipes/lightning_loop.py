"""Train a small Llama with Lightning's ``Trainer``; Forerun needs no change to it.

    torchrun --standalone --nproc-per-node 2 lightning_loop.py --calibrate

``python lightning_loop.py --calibrate`` trains in one process; ranks that Lightning starts itself
(``Trainer(devices=2)``) receive the flag as well.  ``--max-steps 500`` changes the length.
Needs Forerun's extra ``analysis``, lightning and transformers.
"""

from __future__ import annotations

import argparse
import os

import lightning.pytorch as pl

# Before the arguments are parsed: this import removes --calibrate and its options from them.
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

SEQ_LENGTH, VOCAB_SIZE, NUM_ROWS = 64, 256, 1024


def main() -> None:
    """Train to the last step, or until an advised and requested stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--output-dir", default="lightning-out")
    args = parser.parse_args()
    pl.seed_everything(1, verbose=False)
    tokens = torch.randint(0, VOCAB_SIZE, (NUM_ROWS, SEQ_LENGTH))
    # Without --calibrate in the launch: callbacks=[forerun.lightning_callback(steps=20)].
    trainer = pl.Trainer(
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp",
        # A known end; max_epochs alone suffices if the loader has a length.
        max_steps=args.max_steps,
        accumulate_grad_batches=2,
        default_root_dir=args.output_dir,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Llama(), DataLoader(tokens, batch_size=4))  # type: ignore[arg-type]


class Llama(pl.LightningModule):
    """A decoder of four layers, whose shape is read from the inner model so that layouts are
    answered.

    For a model that transformers does not know, only steps and the end are answered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=4,
                hidden_size=128,
                intermediate_size=256,
                num_attention_heads=4,
                num_key_value_heads=4,
                vocab_size=VOCAB_SIZE,
                max_position_embeddings=SEQ_LENGTH,
            )
        )

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """Return the loss of a micro-batch."""
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one optimizer, whose steps are the run's."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    main()
