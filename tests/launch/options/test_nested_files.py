"""Files in which a trainer's overrides stand over a model of another file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_shape import run_of

from forerun.calib.errors import ConfigError
from forerun.calib.workload import Precision
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
TRAINER = "trainable: true\nmicro_batch_size: 1\nprecision:\n  bf16: true\n  fp16: false\n"


def write_config_files(folder: Path, models: str = ".") -> Path:
    """The three kinds of files of Primus: an experiment, a model, and what a module builds on."""
    place, modules = folder / models, folder / models.replace("models", "modules")
    place.mkdir(parents=True, exist_ok=True)
    modules.mkdir(parents=True, exist_ok=True)
    (place / "small.yaml").write_text(MODEL)
    (place / "base.yaml").write_text(BASE)
    (modules / "pre_trainer.yaml").write_text("extends:\n  - ../trainer_base.yaml\n")
    (modules.parent / "trainer_base.yaml").write_text(TRAINER)
    path = folder / "examples" / "exp.yaml"
    path.parent.mkdir()
    path.write_text(EXPERIMENT)
    return path


@pytest.mark.parametrize(
    "models", [".", "models", "configs/models/megatron", "primus/configs/models/megatron"]
)
def test_overrides_stand_over_the_model_and_what_it_builds_on(tmp_path: Path, models: str) -> None:
    config = read_config(write_config_files(tmp_path, models), run_of(), num_ranks=2).config
    model, batch = config.model, config.batch
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (4, 128, 4)
    assert (model.seq_length, batch.micro_batch_size, batch.global_batch_size) == (64, 2, 16)
    assert config.parallelism.overlaps_grad_reduce and config.parallelism.num_ranks == 2
    assert config.precision is Precision.BF16, "as the base of the module says"


def test_a_model_may_build_on_as_many_files_as_in_primus(tmp_path: Path) -> None:
    """Primus' llama3.1_70B.yaml builds on five files, one after another."""
    path = write_config_files(tmp_path)
    for number in range(5):
        following = f"extends:\n  - {number + 1}.yaml\n" if number < 4 else BASE
        (tmp_path / f"{number}.yaml").write_text(following)
    (tmp_path / "base.yaml").write_text("extends:\n  - 0.yaml\n")
    assert read_config(path, run_of(), num_ranks=2).config.model.num_attention_heads == 4


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


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name in ("small.yaml", "pre_trainer.yaml", "base.yaml"):
        path = write_config_files(tmp_path / name)
        (tmp_path / name / name).unlink()
        with pytest.raises(ConfigError, match=rf"{re.escape(name)}, which is not beside it"):
            read_config(path, run_of())


def test_models_that_build_on_each_other_end(tmp_path: Path) -> None:
    path = write_config_files(tmp_path)
    (tmp_path / "base.yaml").write_text("bases: small.yaml\n")
    with pytest.raises(ConfigError, match="builds on itself"):
        read_config(path, run_of())


def test_a_file_that_builds_on_others_without_modules_is_read_with_them(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE + TRAINER + "seq_length: 64\nhidden_size: 64\n")
    path = tmp_path / "run.yaml"
    path.write_text("extends: base.yaml\nnum_layers: 6\nprecision:\n  fp16: false\n")
    config = read_config(path, run_of(), num_ranks=2).config
    assert (config.model.num_layers, config.precision) == (6, Precision.BF16)


def test_several_modules_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(EXPERIMENT + "  post_trainer:\n    overrides:\n      num_layers: 8\n")
    with pytest.raises(ConfigError, match="modules pre_trainer, post_trainer; keep one"):
        read_config(path, run_of())


def test_a_plain_file_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text(BASE + "hidden_size: 64\nseq_length: 64\nmicro_batch_size: 1\n")
    config = run_of()
    assert read_config(path, replace(config)).config.model.num_layers == 2
