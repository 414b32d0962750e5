"""Options of ``plan``, read from text: numbers of GPUs, batches, devices, prices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_shape import SMALL

from forerun.calib.errors import ConfigError
from forerun.calib.workload.config import Batch, Cadence, Parallelism, RunConfig
from forerun.launch.cli import build_parser
from forerun.launch.options.plan_options import (
    PLAN_OPTIONS,
    Objective,
    PlanQuestion,
    read_batch,
    read_counts,
    read_question,
)
from forerun.launch.verbs.plan import question_options

RUN = RunConfig(
    model=replace(SMALL, max_position_embeddings=SMALL.seq_length),
    parallelism=Parallelism(dp=8, ranks_per_node=8),
    batch=Batch(micro_batch_size=4, global_batch_size=64),
)


def question(*words: str) -> PlanQuestion:
    args = build_parser().parse_args(["plan", str(Path()), *words])
    return read_question(**question_options(args))


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("64", (64,)),
        ("64,256,64", (64, 256)),
        ("8..1024", (8, 16, 32, 64, 128, 256, 512, 1024)),
        ("72..300", (72, 144, 288)),
        ("8..8", (8,)),
        ("8..16,96", (8, 16, 96)),
    ],
)
def test_numbers_of_gpus(text: str, counts: tuple[int, ...]) -> None:
    assert read_counts(text) == counts


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("", (64, 64)), ("256", (256, 256)), ("xGPUS", (128, 1024)), ("2xgpus", (32, 256))],
)
def test_the_batch_of_so_many_gpus(text: str, sizes: tuple[int, int]) -> None:
    assert tuple(read_batch(text).size(RUN, count) for count in (16, 128)) == sizes


def test_a_batch_that_is_no_whole_number_is_refused() -> None:
    rule = read_batch("xGPUS")
    odd = replace(RUN, batch=Batch(micro_batch_size=1, global_batch_size=8))
    assert rule.size(odd, 3) == 3
    wide = replace(RUN, parallelism=Parallelism(dp=2, tp=4))
    few = replace(wide, batch=Batch(micro_batch_size=1, global_batch_size=2))
    with pytest.raises(ConfigError, match="not a whole number of samples on 3 GPUs"):
        rule.size(few, 3)


def test_nothing_asked_is_the_run_itself() -> None:
    request = question()
    assert request.apply_to(RUN, 8) == RUN
    assert (request.counts, request.devices, request.top) == ((), (), 10)
    assert request.objective is Objective.TIME and request.price(0) is None


def test_what_is_asked_changes_the_run_that_layouts_are_made_of() -> None:
    request = question(*["--gbs", "12", "--seq-length", "64", "--gpus-per-node", "4"])
    ramped = replace(RUN, cadence=Cadence(full_batch_size=64))
    config = request.apply_to(ramped, 8)
    assert config.model.seq_length == config.model.max_position_embeddings == 64
    assert config.parallelism.ranks_per_node == 4
    # 12 samples over 8 replicas of 4: four replicas of three.
    assert (config.parallelism.dp, config.batch.micro_batch_size) == (4, 1)
    assert config.batch.global_batch_size == config.cadence.full_batch_size == 12


WORDS = {
    "--gpus": "8", "--gpus-per-node": "4", "--global-batch-size": "xGPUS", "--seq-length": "64",
    "--memory-gib": "40", "--objective": "cost", "--price-per-gpu-hour": "2", "--tokens": "1T",
    "--keep": "tp=2", "--why": "pp=2", "--top": "3",
}  # fmt: skip


def test_each_option_changes_one_field_from_words_and_from_python() -> None:
    assert [option.names[0] for option in PLAN_OPTIONS.values()] == sorted(
        WORDS, key=lambda name: [*PLAN_OPTIONS].index(field_of(name))
    )
    for name, text in WORDS.items():
        asked = question(name, text)
        assert asked == read_question(**{PLAN_OPTIONS[field_of(name)].parameter: text})
        changed = {one for one in PLAN_OPTIONS if getattr(asked, one) != getattr(question(), one)}
        assert changed == {field_of(name)}


def field_of(name: str) -> str:
    return next(key for key, option in PLAN_OPTIONS.items() if name in option.names)


def test_devices_have_prices_of_their_own_or_one() -> None:
    request = question("--device", "H100,b200", "--price-per-gpu-hour", "2.5,4")
    assert request.devices == ("NVIDIA H100 80GB HBM3", "NVIDIA B200")
    assert [request.price(place) for place in (0, 1)] == [2.5, 4.0]
    assert question("--price-per-gpu-hour", "3", "--device", "H100,B200").price(1) == 3.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus 0", "below 1"),
        ("--gpus x", "whole number"),
        ("--gpus 8..2", r"write 2\.\.8"),
        ("--gpus 8..", "whole number"),
        ("--gpus 1..99999999999999999999", "64 bits"),
        (f"--gpus {','.join(map(str, range(1, 60)))}", "at most 32"),
        ("--gpus-per-node -8", "below 1"),
        ("--device B20", "did you mean B200"),
        ("--objective speed", "time or cost"),
        ("--price-per-gpu-hour 0", "not above 0"),
        ("--price-per-gpu-hour nan", "not above 0"),
        ("--price-per-gpu-hour 1,2", "2 prices for 1 devices"),
        ("--memory-gib 0", "above 0"),
        ("--memory-gib nan", "above 0"),
        ("--memory-gib much", "not a number"),
        ("--seq-length 1.5", "whole number"),
        ("--global-batch-size 0xGPUS", "below 1"),
        ("--keep tp", "NAME=VALUE"),
        ("--why tq=8", "did you mean tp"),
        ("--top 0", "below 1"),
    ],
)
def test_an_error_says_value_rule_and_remedy(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        question(*words.split())
