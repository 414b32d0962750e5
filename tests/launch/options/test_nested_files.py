"""Files in which a trainer's overrides stand over a model of another file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_shape import run_of

from forerun.calib.errors import ConfigError
from forerun.launch.options.config_files import read_config

EXPERIMENT = """
work_group: ${TEAM:amd}
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: small.yaml
    overrides:
      seq_length: ${SEQ_LENGTH:64}
      micro_batch_size: 2
      global_batch_size: ${GBS:16}
      hidden_size: 128
      overlap_grad_reduce: ${OVERLAP:true}
"""
MODEL = "bases:\n  - base.yaml\nhidden_size: 64\nnum_layers: 4\n"
BASE = "num_attention_heads: 4\nmax_position_embeddings: 64\nvocab_size: 512\nnum_layers: 2\n"


def write_config_files(folder: Path, models: str = ".") -> Path:
    place = folder / models
    place.mkdir(parents=True, exist_ok=True)
    (place / "small.yaml").write_text(MODEL)
    (place / "base.yaml").write_text(BASE)
    path = folder / "examples" / "exp.yaml"
    path.parent.mkdir()
    path.write_text(EXPERIMENT)
    return path


@pytest.mark.parametrize("models", [".", "models", "configs/models/megatron"])
def test_overrides_stand_over_the_model_and_what_it_builds_on(tmp_path: Path, models: str) -> None:
    config = read_config(write_config_files(tmp_path, models), run_of(), num_ranks=2).config
    model, batch = config.model, config.batch
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (4, 128, 4)
    assert (model.seq_length, batch.micro_batch_size, batch.global_batch_size) == (64, 2, 16)
    assert config.parallelism.overlaps_grad_reduce and config.parallelism.num_ranks == 2


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = write_config_files(tmp_path)
    (tmp_path / "small.yaml").unlink()
    with pytest.raises(ConfigError, match=r"small\.yaml, which is not beside it"):
        read_config(path, run_of())


def test_models_that_build_on_each_other_end(tmp_path: Path) -> None:
    path = write_config_files(tmp_path)
    (tmp_path / "base.yaml").write_text("bases: small.yaml\n")
    with pytest.raises(ConfigError, match="not beside it"):
        read_config(path, run_of())


def test_a_plain_file_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text(BASE + "hidden_size: 64\nseq_length: 64\nmicro_batch_size: 1\n")
    config = run_of()
    assert read_config(path, replace(config)).config.model.num_layers == 2
