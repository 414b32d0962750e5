"""Files that extend others, in sections."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_shape import run_of

from forerun.calib.errors import ConfigError
from forerun.calib.workload.config import Precision
from forerun.launch.options.config_files import read_config

EXPERIMENT = """
work_group: ${TEAM:amd}
extends: [models/small.yaml, trainer.yaml]
overrides:
  seq_length: ${SEQ_LENGTH:64}
  micro_batch_size: 2
  global_batch_size: ${GBS:16}
hidden_size: 128
overlap_grad_reduce: ${OVERLAP:true}
"""
MODEL = "extends:\n  - base.yaml\nhidden_size: 64\nnum_layers: 4\n"
BASE = "num_attention_heads: 4\nmax_position_embeddings: 64\nvocab_size: 512\nnum_layers: 2\n"
TRAINER = "trainable: true\nprecision:\n  bf16: true\n  fp16: false\n"


def write_config_files(folder: Path) -> Path:
    """An experiment, the model and trainer that it extends, and what these extend."""
    models = folder / "examples" / "models"
    models.mkdir(parents=True)
    (models / "small.yaml").write_text(MODEL)
    (models / "base.yaml").write_text(BASE)
    (models.parent / "trainer.yaml").write_text("extends:\n  - ../trainer_base.yaml\n")
    (folder / "trainer_base.yaml").write_text(TRAINER)
    path = models.parent / "exp.yaml"
    path.write_text(EXPERIMENT)
    return path


def test_a_file_stands_over_those_that_it_extends(tmp_path: Path) -> None:
    described = read_config(write_config_files(tmp_path), run_of(), num_ranks=2)
    config = described.config
    model, batch = config.model, config.batch
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (4, 128, 4)
    assert (model.seq_length, batch.micro_batch_size, batch.global_batch_size) == (64, 2, 16)
    assert config.parallelism.overlaps_grad_reduce and config.parallelism.num_ranks == 2
    assert config.precision is Precision.BF16, "as what the trainer extends says"
    assert described.unknown == ("trainable", "work_group")


def test_files_of_another_kind_are_named_and_not_read(tmp_path: Path) -> None:
    """The modules of Primus, whose files stand in folders of its own."""
    path = tmp_path / "exp.yaml"
    path.write_text("modules:\n  pre_trainer:\n    config: t.yaml\n    model: llama.yaml\n")
    with pytest.raises(ConfigError, match=r"not read: 'config', 'model'"):
        read_config(path, run_of())
    path.write_text(
        "bases: [base.yaml]\nhidden_size: 64\n" + BASE + "seq_length: 64\nmicro_batch_size: 1\n"
    )
    assert "bases" in read_config(path, run_of()).unknown


@pytest.mark.parametrize(
    "text",
    [
        # huggingface/nanotron, examples/config_tiny_llama.yaml
        "model:\n  dtype: bfloat16\n  model_config:\n    hidden_size: 16\nparallelism:\n  dp: 2\n",
        # huggingface/alignment-handbook, recipes/zephyr-7b-beta/sft/config_full.yaml
        "model_name_or_path: mistralai/Mistral-7B-v0.1\nper_device_train_batch_size: 16\n",
    ],
)
def test_a_file_without_sizes_of_a_model_asks_for_them(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"not read: '(dtype|model_name_or_path)'"):
        read_config(path, run_of())


def test_what_a_file_lacks_is_to_be_added_to_it(tmp_path: Path) -> None:
    """As in EleutherAI/gpt-neox, configs/20B.yml, which leaves the vocabulary to a tokenizer."""
    path = tmp_path / "20B.yml"
    sizes = "num_layers: 44\nhidden_size: 6144\nnum_attention_heads: 64\nseq_length: 2048\n"
    sizes += "micro_batch_size: 4\nmax_position_embeddings: 2048\n"
    path.write_text(sizes)
    with pytest.raises(ConfigError, match=rf"add to {re.escape(str(path))} --vocab-size"):
        read_config(path, run_of())
    path.write_text(sizes + "--vocab-size: 50432\n")
    assert read_config(path, run_of()).config.model.vocab_size == 50432


@pytest.mark.parametrize("name", ["models/small.yaml", "trainer.yaml", "base.yaml"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    path = write_config_files(tmp_path)
    next(tmp_path.rglob(Path(name).name)).unlink()
    with pytest.raises(ConfigError, match=rf"extends {re.escape(name)}, which is not beside it"):
        read_config(path, run_of())


def test_files_that_extend_each_other_end(tmp_path: Path) -> None:
    path = write_config_files(tmp_path)
    (path.parent / "models" / "base.yaml").write_text("extends: small.yaml\n")
    with pytest.raises(ConfigError, match="extends itself"):
        read_config(path, run_of())
