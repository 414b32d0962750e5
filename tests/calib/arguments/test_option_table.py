"""One table of options: each name once, and the vocabularies that names settle."""

from __future__ import annotations

from itertools import combinations

import pytest

from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.arguments.megatron_options import (
    ASIDE,
    DERIVED,
    MODELLED,
    MOVES_ALONE,
    NAMES,
    SPELLED,
    SWITCHED_OFF,
    UNMODELLED_SETTINGS,
    is_known,
)
from forerun.calib.errors import ConfigError
from forerun.calib.workload.config import Recompute

LINE = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8"
)

VARIABLES = NAMES["variables"]
OPEN = ("left_out", "left_out_aside", "left_out_unless", "switched_off")


def test_a_name_is_in_one_list_alone() -> None:
    kinds = {kind: {*NAMES[kind]} for kind in (*OPEN, "harmless")}
    kinds |= {"modelled": {*MODELLED}, "derived": {*DERIVED}}
    for one, other in combinations(kinds, 2):
        assert not kinds[one] & kinds[other], (one, other)
    assert not ASIDE & set().union(*(kinds[kind] for kind in kinds if kind[:8] != "left_out"))
    variables = {n for kind in ("left_out", "left_out_between_nodes") for n in VARIABLES[kind]}
    unmodelled = variables | {n for kind in NAMES if kind in OPEN for n in NAMES[kind]}
    moved = [name for names in MOVES_ALONE.values() for name in names]
    assert len(moved) == len(set(moved)) and unmodelled >= set(moved)


def kind_of(option: str) -> str:
    plain = option.lstrip("-").replace("-", "_")
    name = SPELLED.get(plain, (plain, None))[0]
    if name in MODELLED | DERIVED:
        return "modelled"
    if name in ASIDE:
        return "beside the step"
    if name in UNMODELLED_SETTINGS or name in SWITCHED_OFF:
        return "not modelled"
    return "no effect" if is_known(plain) else "unknown"


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ("--tensor-model-parallel-size", "modelled"),
        ("--no-masked-softmax-fusion", "modelled"),
        ("--data-path", "no effect"),
        ("--deterministic-mode", "beside the step"),
        ("--megatron-fsdp-version", "not modelled"),
        ("--hybrid-layer-pattern", "modelled"),
        ("--enable-mhc-connections", "not modelled"),
        ("--no-pad-vocab-size", "not modelled"),
        ("--of-no-parser", "unknown"),
    ],
)
def test_an_option_is_of_one_kind(option: str, kind: str) -> None:
    assert kind_of(option) == kind


def test_options_of_the_first_megatron_are_read() -> None:
    """BigScience's and Megatron-DeepSpeed's scripts checkpoint every layer by one switch, and name
    the reader of the data set."""
    old = "--checkpoint-activations --data-impl mmap --vocab-size 512"
    new = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    described = config_from_command([*LINE.split(), *old.split()])
    expected = config_from_command([*LINE.split(), *new.split(), "--vocab-size", "512"]).config
    assert described.unknown == () and described.config.unmodelled == ()
    assert described.config.recompute is expected.recompute is Recompute.FULL
    assert described.config.recompute_num_layers == expected.recompute_num_layers == 0


@pytest.mark.parametrize(
    ("more", "size"),
    [
        ("--vocab-file v.json --merge-file $DATA/m.txt", 50257),
        ("--tokenizer-type GPT2BPETokenizer", 50257),
        ("--tokenizer-type TikTokenizer", 131072),
    ],
)
def test_a_vocabulary_that_a_tokenizer_settles_is_said(more: str, size: int) -> None:
    description = config_from_command([*LINE.split(), *more.split()])
    assert 0 <= description.config.model.vocab_size - size < 128
    assert f"{size:,}" in description.notes[0]
    stated = config_from_command([*LINE.split(), *more.split(), "--vocab-size", "512"])
    assert stated.config.model.vocab_size == 512 and not stated.notes


@pytest.mark.parametrize("num_layers", ["1", "2"])
def test_chunks_of_several_layers_are_not_taken_for_one(num_layers: str) -> None:
    words = "--vocab-size 512 --recompute-granularity full --recompute-method uniform"
    more = [*words.split(), "--recompute-num-layers", num_layers]
    config = config_from_command([*LINE.split(), *more]).config
    assert (config.recompute_span, config.unmodelled) == (int(num_layers), ())


def test_a_fused_head_is_read_and_an_unknown_loss_refused() -> None:
    words = [*LINE.split(), *["--vocab-size", "512", "--cross-entropy-fusion-impl", "linear"]]
    assert not config_from_command(words).config.fuses_head
    assert config_from_command([*words, "--cross-entropy-loss-fusion"]).config.fuses_head
    with pytest.raises(ConfigError, match="native, te, linear"):
        config_from_command([*words[:-1], "own", "--cross-entropy-loss-fusion"])


def test_a_variable_behind_a_switch_holds_further_options() -> None:
    words = [*LINE.split(), "--vocab-size", "512", "--sequence-parallel", "$MORE"]
    assert config_from_command(words, num_ranks=2).config.model.num_layers == 2
