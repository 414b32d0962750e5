"""No key of a file of arguments is dropped in silence, wherever in the file it stands."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_shape import run_of

from forerun.calib.arguments.megatron_command import Described, config_from_command
from forerun.calib.arguments.megatron_options import HARMLESS, SPELLED, UNMODELLED_SETTINGS
from forerun.calib.errors import ConfigError
from forerun.calib.workload.config import Attention, Precision
from forerun.launch.options.config_files import read_config

SIZES: dict[str, Any] = {
    **{"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32},
    **{"max_position_embeddings": 32, "micro_batch_size": 1, "global_batch_size": 32},
    **{"vocab_size": 512},
}
MODELLED: dict[str, Any] = {
    **{"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "bf16": True},
    **{"use_distributed_optimizer": True, "recompute_granularity": "full", "swiglu": True},
    **{"disable_bias_linear": True, "fp8_format": "hybrid", "normalization": "RMSNorm"},
    **{"activation_func": "swiglu", "train_iters": 7, "ffn_hidden_size": 96},
    **{"untie_embeddings_and_output_weights": True, "attention_backend": "unfused"},
}
"""Arguments that change a run of ``SIZES``, with a value that is no default."""
VARIABLES = {"NCCL_ALGO": "Ring", "NVTE_FLASH_ATTN": 0, "NCCL_OF_TOMORROW": 1, "DATA": "/d"}
OTHERS = ("teacher", "use_of_tomorrow", "trainer_name", "swiglu_of_mine")
PLACES = ("", "model", "system.precision", "MODEL_ARGS", "modules.pre_trainer.overrides", "base")
"""Sections by their path; ``base`` is a file that this one extends."""
POOLS = ([*MODELLED], OTHERS, sorted(HARMLESS), sorted({*UNMODELLED_SETTINGS} - {"yaml_cfg"}))
PARTS = st.dictionaries(
    st.one_of(*map(st.sampled_from, POOLS)), st.sampled_from(PLACES), min_size=1, max_size=6
)


def file_of(folder: Path, values: dict[str, Any], places: dict[str, str]) -> Path:
    """The file with each value in its place, and the one that it extends."""
    parts: dict[str, dict[str, Any]] = {"run": {"extends": ["base.json"]}, "base": {}}
    for name, value in values.items():
        place = places.get(name, "")
        section = parts["base" if place == "base" else "run"]
        for part in place.split(".") if place not in ("", "base") else ():
            section = section.setdefault(part, {})
        section[name] = value
    for name, content in parts.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder / "run.json"


def described(values: dict[str, Any], places: dict[str, str]) -> Described | str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return read_config(file_of(Path(folder), values, places), run_of(), num_ranks=8)
        except ConfigError as err:
            return str(err).replace(folder, "")


@settings(max_examples=150, deadline=None)
@given(PARTS, st.sampled_from(PLACES))
def test_a_key_is_read_or_named_or_known_to_move_nothing(
    places: dict[str, str], of_sizes: str
) -> None:
    values = {**SIZES, **{name: MODELLED.get(name, 3) for name in places}}
    everywhere = {**dict.fromkeys(SIZES, of_sizes), **places}
    whole = described(values, everywhere)
    if isinstance(whole, str):
        return  # a refusal, such as of two spellings of one setting
    for name in places.keys() - HARMLESS:
        rest = described({n: v for n, v in values.items() if n != name}, everywhere)
        is_read = isinstance(rest, str) or (rest, rest.config.given) != (whole, whole.config.given)
        # Two spellings of one setting need no two changes.
        others = {SPELLED.get(other, (other,))[0] for other in places if other != name}
        is_twice = SPELLED.get(name, (name,))[0] in others
        assert is_read or is_twice or {*places} >= {"swiglu", "activation_func"}, name


@settings(max_examples=60, deadline=None)
@given(PARTS, st.sampled_from(PLACES))
def test_where_a_key_stands_changes_nothing(places: dict[str, str], of_sizes: str) -> None:
    values = {**SIZES, **{name: MODELLED.get(name, 3) for name in places}}
    nested = described(values, {**dict.fromkeys(SIZES, of_sizes), **places})
    flat = described(values, {})
    if isinstance(nested, str) or isinstance(flat, str):
        assert isinstance(nested, str) and isinstance(flat, str)
        return
    assert nested.config == flat.config and {*nested.unknown} == {*flat.unknown}


@pytest.mark.parametrize("section", ["ENV_VARS", "envs", "env_vars", "environment"])
@pytest.mark.parametrize("names", [("NCCL_ALGO",), ("NCCL_OF_TOMORROW", "DATA"), ("DATA",)])
def test_variables_of_a_file_are_words_in_front_of_a_command(
    tmp_path: Path, section: str, names: tuple[str, ...]
) -> None:
    """As in Megatron-LM's functional tests, which have the arguments in ``MODEL_ARGS``."""
    options = {f"--{name.replace('_', '-')}": value for name, value in SIZES.items()}
    variables = {name: VARIABLES[name] for name in names}
    file = tmp_path / "model_config.json"
    file.write_text(json.dumps({section: variables, "MODEL_ARGS": options}))
    words = [str(word) for option in options.items() for word in option]
    front = [f"{name}={value}" for name, value in variables.items()]
    launch = ["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py"]
    line = config_from_command([*front, *launch, *words])
    assert read_config(file, run_of(), num_ranks=8) == line


def test_both_variables_of_fused_attention_in_a_file_leave_the_unfused_one(tmp_path: Path) -> None:
    file = tmp_path / "model_config.json"
    both = {"NVTE_FLASH_ATTN": 0, "NVTE_FUSED_ATTN": 0}
    file.write_text(json.dumps({"ENV_VARS": both, "MODEL_ARGS": SIZES}))
    assert read_config(file, run_of()).config.attention is Attention.UNFUSED


def test_sections_that_differ_are_named(tmp_path: Path) -> None:
    file = tmp_path / "distill.json"
    file.write_text(json.dumps({"model": SIZES, "teacher": {"num_layers": 80}}))
    with pytest.raises(ConfigError, match="differ in num_layers, 8 and 80; leave one out"):
        read_config(file, run_of())
    file.write_text(
        json.dumps({"model": SIZES, "optimizer": {"bf16": True}, "ddp": {"bf16": True}})
    )
    assert read_config(file, run_of()).config.precision is Precision.BF16


@pytest.mark.parametrize("is_class", [False, True])
def test_a_class_of_core_needs_no_switch_for_groups(tmp_path: Path, is_class: bool) -> None:
    """``TransformerConfig`` has ``num_query_groups`` alone; Megatron-LM's parser ignores that
    without ``--group-query-attention``."""
    model = {**SIZES, "num_query_groups": 2, **({"_target_": "a.Provider"} if is_class else {})}
    file = tmp_path / "run_config.json"
    file.write_text(json.dumps({"model": model}))
    assert read_config(file, run_of()).config.model.num_query_groups == (2 if is_class else 4)


def test_a_file_that_builds_on_ever_more_files_is_refused(tmp_path: Path) -> None:
    """Each of ten files builds on the two next ones, a thousand ways in all."""
    for number in range(12):
        bases = [f"{number + 1}{side}.json" for side in "ab"] if number < 11 else []
        for side in "ab":
            (tmp_path / f"{number}{side}.json").write_text(json.dumps({"extends": bases}))
    with pytest.raises(ConfigError, match="over 30 files"):
        read_config(tmp_path / "0a.json", run_of())
