"""A loop observed by ``attach`` without a configuration: batch, length and who averages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from forerun.calib.records.record_kinds import DataLength, LoopRecord
from forerun.calib.samples.store import read_run
from forerun.hooks.session.attaching import attach

try:  # here, since transformers adds a finder of modules of its own
    import tiny_llama
except ModuleNotFoundError:
    tiny_llama = None

ROWS, BATCH, SEQ, ACCUMULATED = 96, 4, 6, 2
STEPS = ROWS // BATCH // ACCUMULATED


def train(directory: Path, model: nn.Module, rows: Any, **options: Any) -> LoopRecord:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach_options = {"directory": directory, "steps": 4, "is_analysed": False, **options}
    with attach(model, optimizer, **attach_options) as run:
        for number, batch in enumerate(DataLoader(rows, batch_size=BATCH, shuffle=True)):
            model(batch).sum().backward()
            if (number + 1) % ACCUMULATED == 0:
                optimizer.step()
                optimizer.zero_grad()
                run.step()
    return read_run(directory).loops[0]


@pytest.mark.parametrize("train_iters", [None, 77])
def test_tokens_and_length_are_those_of_the_loop(tmp_path: Path, train_iters: int | None) -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 1))
    rows = torch.randint(0, 16, (ROWS, SEQ))
    assert train(tmp_path, model, rows, train_iters=train_iters) == LoopRecord(
        num_steps=train_iters or 0,
        data=DataLength.KNOWN,
        pass_end=STEPS,
        pass_steps=STEPS,
        samples=BATCH * ACCUMULATED,
        tokens=BATCH * SEQ * ACCUMULATED,
        grad_nbytes=4 * (16 * 8 + 8 + 1),
    )


def test_samples_that_are_no_tokens_are_counted(tmp_path: Path) -> None:
    loop_record = train(tmp_path, nn.Linear(SEQ, 1), torch.randn(ROWS, SEQ))
    assert (loop_record.samples, loop_record.tokens) == (BATCH * ACCUMULATED, 0)


def test_a_loop_that_ends_before_its_length_shows_tells_what_it_has(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, directory=tmp_path, train_iters=9, is_analysed=False) as run:
        for _ in range(5):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
            run.step()
    loop_record = read_run(tmp_path).loops[0]
    assert loop_record == LoopRecord(num_steps=9, grad_nbytes=4 * 3)  # nobody showed a batch


@pytest.mark.skipif(tiny_llama is None, reason="transformers is not installed")
def test_a_model_of_transformers_describes_itself(tmp_path: Path) -> None:
    model = tiny_llama.tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach_options: dict[str, Any] = {"directory": tmp_path, "steps": 4, "is_analysed": False}
    with attach(model, optimizer, train_iters=50, **attach_options) as run:
        for _ in range(8):
            tokens = torch.randint(0, 64, (2, 16))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
    config = read_run(tmp_path).configs[0]
    assert (config.cadence.train_iters, config.model.seq_length) == (50, 16)
    assert config.batch.micro_batch_size == 2
