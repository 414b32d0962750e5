"""Trainings that never end by themselves: after some steps they ask their session for a stop.

``adapter_stops.py KIND DIRECTORY`` prints the steps that were done when training had ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forerun.calib.records.files import replace_file
from forerun.hooks.process.launch_identity import LAUNCH_ID, launch_folder
from forerun.launch.store.launch_files import REQUEST_RULE, STOP_REQUEST

STEPS, STOP_STEP = 1_000_000, 40
OPTIONS: dict[str, Any] = {"steps": 8, "train_iters": STEPS, "on_advice": "stop"}


def request_stop(step: int, directory: Path) -> None:
    """Request a stop as ``forerun run`` does before the scheduler's limit; later steps wait."""
    if step >= STOP_STEP:
        time.sleep(0.02)
    if step == STOP_STEP:
        name = os.environ[LAUNCH_ID]
        value = {"schema": 1, "launch_id": name, "reason": "the limit is near"}
        value |= {"rule": REQUEST_RULE, "unix_s": time.time()}
        path = launch_folder(directory / "out", name) / STOP_REQUEST
        replace_file(path, json.dumps(value))


def hugging_face(directory: Path) -> int:
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from forerun.hooks.adapters.hugging_face import hugging_face_callback

    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            request_stop(state.global_step, directory)

    size = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, num_attention_heads=2, **size))
    tokens = torch.randint(0, 64, (64, 8))
    data: Any = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        output_dir=str(directory / "saved"),
        max_steps=STEPS,
        save_strategy="no",
        logging_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    watched = hugging_face_callback(directory=directory / "out", **OPTIONS)
    trainer = Trainer(model, arguments, None, data, callbacks=[watched, Asks()])
    trainer.train()
    return trainer.state.global_step


def lightning(directory: Path) -> int:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from forerun.hooks.adapters.lightning import lightning_callback

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(16, 1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Asks(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
            request_stop(trainer.global_step, directory)

    rows = torch.utils.data.TensorDataset(torch.randn(4096, 16))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        max_epochs=-1,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        callbacks=[
            lightning_callback(directory=directory / "out", **OPTIONS),
            ModelCheckpoint(directory / "saved", every_n_train_steps=STEPS),
            Asks(),
        ],
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(rows, batch_size=4))
    return trainer.global_step


KINDS: dict[str, Callable[[Path], int]] = {"hugging_face": hugging_face, "lightning": lightning}

if __name__ == "__main__":
    print("ENDED", KINDS[sys.argv[1]](Path(sys.argv[2])), flush=True)
