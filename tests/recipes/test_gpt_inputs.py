"""Arguments that do not fit are named; data depends on the sample's number and nothing else."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

RECIPES = Path(__file__).parents[2] / "recipes"


def sibling(name: str) -> ModuleType:
    """A module of the recipe, which is a plain script and no package."""
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


arguments = sibling("gpt_arguments")


@pytest.mark.parametrize(
    ("given_arguments", "message"),
    [
        ("--num-layers 5 --pipeline-model-parallel-size 2", "5 layers do not split over PP 2"),
        ("--num-layers-per-virtual-pipeline-stage 1", "interleaving needs PP 2 or more"),
        ("--overlap-param-gather", "needs --use-distributed-optimizer"),
        ("--hidden-size 130", "hidden size 130 is not a multiple of 4 heads"),
        ("--group-query-attention --num-query-groups 3", "3 query groups must divide 4 heads"),
    ],
)
def test_arguments_that_do_not_fit_are_named(
    given_arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        arguments.parse_args(given_arguments.split())
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("given_arguments", "message"),
    [
        ("--tensor-model-parallel-size 4", r"world size 2 .* TP x PP = 4; add ranks"),
        ("--global-batch-size 10", "global batch size 10 .* = 4; nearest: 8"),
    ],
)
def test_a_world_that_does_not_fit_is_named(given_arguments: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        arguments.fit_to_world(arguments.parse_args(given_arguments.split()), 2)


def test_a_gated_ffn_and_the_vocabulary_are_sized_as_in_megatron() -> None:
    args = arguments.parse_args(["--swiglu", "--hidden-size", "128"])
    assert args.ffn_hidden_size == 320  # int(4 * 128 * 2 / 3) // 64 * 64
    assert args.padded_vocab_size == 256


pytest.importorskip("torch")
data = sibling("gpt_data")


def test_windows_run_across_files_and_the_splits_do_not_meet(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).bytes(1207)
    paths = [tmp_path / name for name in "abc"]
    for path, part in zip(paths, (whole[:7], whole[7:207], whole[207:]), strict=True):
        path.write_bytes(part)
    corpus = data.Corpus(paths, seq_length=15, seed=1)
    starts = {
        split: {whole.index(corpus.window(split, sample).tobytes()) for sample in range(400)}
        for split in data.Split
    }
    border = 1207 * 95 // 100
    assert max(starts[data.Split.TRAIN]) + 16 <= border <= min(starts[data.Split.VALID])
    assert starts[data.Split.TRAIN] & set(range(191, 207))  # begins in one file, ends in the next
    assert len(starts[data.Split.TRAIN]) > 250


def test_too_little_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 100)
    with pytest.raises(SystemExit, match=r"100 bytes .* sequence length of 63; give at least"):
        data.Corpus([tmp_path / "short"], seq_length=63, seed=1)


def test_a_missing_file_is_named() -> None:
    args = arguments.parse_args(["--data-path", "no/such/file"])
    with pytest.raises(SystemExit, match="no/such/file"):
        data.open_corpus(args)


@given(st.sampled_from([1, 2, 4]), st.integers(0, 50).map(lambda steps: 8 * steps))
def test_the_ranks_share_one_global_batch(num_ranks: int, first: int) -> None:
    corpus = data.CountingCorpus(seq_length=8, seed=5)
    results = []
    for rank in range(num_ranks):
        micro_batches = data.rows(
            corpus,
            data.Split.TRAIN,
            first_sample=first,
            micro_batch_size=2,
            data_parallel_rank=rank,
            data_parallel_size=num_ranks,
        )
        results += [*itertools.islice(micro_batches, 4 // num_ranks)]
    truth = [corpus.window(data.Split.TRAIN, first + sample) for sample in range(8)]
    assert sorted(bytes(row) for row in np.concatenate(results)) == sorted(map(bytes, truth))
