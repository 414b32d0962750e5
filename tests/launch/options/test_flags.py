"""Flags: what is taken out of a command line, what is read from it, and what a mistake says."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun import _forerun_autoload as entry
from forerun.calib.errors import ConfigError
from forerun.calib.workload.run_options import (
    AutoSwitch,
    DeviceChoice,
    OnAdvice,
    RunOptions,
    options,
)
from forerun.hooks.process import ranks
from forerun.hooks.process.settings import Settings
from forerun.launch.options import flags

ENVIRON = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
ALL = (
    "--calibrate", "--calibrate-steps=8", "--calibrate-every=500", "--calibrate-dir=a=b",
    "--calibrate-on-advice=alert", "--calibrate-deadline=2030-01-31T18:00:00Z",
    "--calibrate-budget-hours=48.5", "--calibrate-restart-cost=10m", "--calibrate-confidence=0.8",
    "--calibrate-gpus=8,16", "--calibrate-wandb=off", "--calibrate-device=cpu",
)  # fmt: skip


def parse(*our_flags: str, host: tuple[str, ...] = (), **environ: str) -> Settings:
    return flags.parse(our_flags, {**ENVIRON, **environ}, host, ("python", "-m", "companion"))


def test_every_flag_reaches_its_setting() -> None:
    settings = parse(*ALL, host=("train.py", "--lr", "1"))
    assert (settings.steps, settings.every, settings.directory) == (8, 500, Path.cwd() / "a=b")
    assert settings.on_advice is OnAdvice.ALERT
    assert settings.goals.deadline_unix_s == 1896112800  # date -u -d 2030-01-31T18:00 +%s
    assert (settings.goals.budget_hours, settings.goals.restart_cost_s) == (48.5, 600.0)
    assert (settings.goals.confidence, settings.goals.gpus) == (0.8, (8, 16))
    assert (settings.wandb, settings.device) == (AutoSwitch.OFF, DeviceChoice.CPU)
    assert settings.host_argv == ("train.py", "--lr", "1")
    assert settings.companion_command == ("python", "-m", "companion")
    assert (settings.rank.rank, settings.rank.world_size, settings.rank.local_rank) == (1, 4, 1)


def test_no_flag_gives_the_defaults_of_the_settings() -> None:
    settings = parse()
    assert settings == Settings(
        rank=settings.rank,
        directory=Path.cwd() / RunOptions().directory,
        companion_command=("python", "-m", "companion"),
        is_answered=True,
        host_argv=(),
    )


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86400)]
)
def test_restart_cost_has_units(text: str, seconds: float) -> None:
    assert parse(f"--calibrate-restart-cost={text}").goals.restart_cost_s == seconds


def test_a_deadline_may_be_unix_seconds_and_the_last_of_two_flags_wins() -> None:
    assert parse("--calibrate-deadline=5", "--calibrate-deadline=7.5").goals.deadline_unix_s == 7.5


@pytest.mark.parametrize(
    "flag",
    [
        "--calibrate=20", "--calibrate-steps", "--calibrate-steps=", "--calibrate-steps=3",
        "--calibrate-steps=x", "--calibrate-every=-1", "--calibrate-dir=",
        "--calibrate-on-advice=mail", "--calibrate-deadline=noon",
        "--calibrate-deadline=nan", "--calibrate-deadline=-5", "--calibrate-budget-hours=0",
        "--calibrate-budget-hours=inf", "--calibrate-restart-cost=10w", "--calibrate-confidence=9",
        "--calibrate-confidence=nan", "--calibrate-gpus=8,,16", "--calibrate-gpus=0",
        "--calibrate-wandb=yes", "--calibrate-device=tpu", "--calibrate-stepps=9",
        "--forerun=20", "--forerun-steps", "--forerun-steps=3", "--forerun-stepps=9",
    ],
)  # fmt: skip
def test_a_mistake_gives_one_line_with_value_rule_and_remedy(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--calibrate", flag)
    value, _, rest = str(caught.value).partition(": ")
    assert value == flag
    assert re.fullmatch(r"[^\n;]+; [^\n]+", rest)


def test_an_unknown_flag_names_the_nearest_and_all_known() -> None:
    with pytest.raises(ConfigError, match="did you mean --calibrate-steps=") as caught:
        parse("--calibrate-stepps=9")
    assert all(flag.partition("=")[0] in str(caught.value) for flag in ALL)


def test_the_wrapper_tells_the_limit_and_that_it_may_ask_for_a_stop() -> None:
    alone = parse("--calibrate")
    assert (alone.goals.limit_unix_s, alone.takes_requests) == (None, False)
    settings = parse("--calibrate", FORERUN_LIMIT_UNIX_S="1795309392", FORERUN_REQUESTS="1")
    assert (settings.goals.limit_unix_s, settings.takes_requests) == (1795309392.0, True)
    with pytest.raises(ConfigError, match="FORERUN_LIMIT_UNIX_S=soon"):
        parse(FORERUN_LIMIT_UNIX_S="soon")


def test_the_device_variable_counts_and_a_flag_wins_over_it() -> None:
    assert parse(FORERUN_DEVICE="cpu").device is DeviceChoice.CPU
    assert parse("--calibrate-device=auto", FORERUN_DEVICE="cpu").device is DeviceChoice.AUTO
    with pytest.raises(ConfigError, match=r"FORERUN_DEVICE=gpu: must be auto or cpu"):
        parse(FORERUN_DEVICE="gpu")


@pytest.mark.parametrize("broken", [{"RANK": "x"}, {"RANK": "4"}, {"WORLD_SIZE": "two"}])
def test_broken_launch_variables_are_named(broken: dict[str, str]) -> None:
    key, value = next(iter(broken.items()))
    with pytest.raises(ConfigError, match=f"{key}={value}.*launch with torchrun"):
        parse(**broken)


def test_cadence_is_read_in_both_forms_and_the_last_wins() -> None:
    host = ("t.py", "--train-iters", "9", "--eval-interval=5", "--train-iters=70", "--eval-iters")
    hint = parse(host=host).cadence
    assert (hint.train_iters, hint.eval_interval, hint.eval_iters) == (70, 5, None)


SURE = [flag for flag in ALL if "=" in flag]
ALIAS = [flag.replace("--calibrate", "--forerun") for flag in ALL]
HOST = st.text(max_size=12).filter(
    lambda text: text != "--" and not text.startswith(("--calibrate", "--forerun"))
)
NEAR = st.sampled_from(
    ["--calibrated", "-calibrate", "calibrate", "--calibrator=1", "--no-calibrate", "--forerunner"]
)
OTHERS = ["--calibrate-momentum=0.9", "--calibrate_data=x", "--calibrate=4", "--calibrate-batches"]
COLLIDING = st.sampled_from(OTHERS)


@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from(SURE), HOST | NEAR | COLLIDING)),
    st.lists(HOST | NEAR | st.sampled_from(ALL)),
)
def test_split_takes_exactly_our_flags_and_keeps_the_order(
    pairs: list[tuple[bool, str, str]], after: list[str]
) -> None:
    argv = [ours if is_ours else host for is_ours, ours, host in pairs]
    parts = flags.split([*argv, "--", *after])
    assert parts.flags == tuple(ours for is_ours, ours, _ in pairs if is_ours)
    assert parts.rest == (*(host for is_ours, _, host in pairs if not is_ours), "--", *after)
    assert parts.present == bool(parts.flags)


@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from(ALIAS), HOST | NEAR | st.sampled_from(ALL)))
)
def test_the_alias_leaves_everything_else_to_the_program(
    pairs: list[tuple[bool, str, str]],
) -> None:
    argv = [ours if is_ours else host for is_ours, ours, host in pairs]
    parts = flags.split(["--forerun", *argv])
    assert parts.flags == ("--forerun", *(ours for is_ours, ours, _ in pairs if is_ours))
    assert parts.rest == tuple(host for is_ours, _, host in pairs if not is_ours)


@pytest.mark.parametrize("line", [
    "--calibrate --calibrate-momentum 0.9",
    "--calibrate-batches=3",
    "--calibrate-batches=3 --calibrate",
    "--calibrate --calib-mom 0.9 --calibrate-mom 0.9",
    "--calibrate=entropy",
    "--calibrate entropy --lr 1",
    "--calibrate -0.5",
    "--calibrate - --lr 1",
    "--calibrate --calibrate_data x",
    "--calibrate --calibrate-steps 8",
    "--calibrate-steps 8",
    "--calibrate-stesp=8",
    "--calibrated --no-calibrate --calibrator=2",
])  # fmt: skip
def test_what_another_program_may_mean_is_left_alone(line: str) -> None:
    words = line.split()
    parts = flags.split(words)
    assert (parts.flags, parts.rest) == ((), tuple(words))
    looks_ours = ("--calibrate-", "--calibrate_", "--calibrate=", "--calibrate ")
    assert parts.lookalikes == tuple(word for word in words if f"{word} ".startswith(looks_ours))


@pytest.mark.parametrize(("line", "ours"), [
    ("--calibrate", "--calibrate"),
    ("--lr 1 --calibrate", "--calibrate"),
    ("--calibrate --lr 1", "--calibrate"),
    ("--calibrate --calibrate-stesp=8", "--calibrate --calibrate-stesp=8"),
    ("--calibrate-steps=8 --calibrate data.txt", "--calibrate-steps=8 --calibrate"),
    ("--calibrate-steps=8 --calibrate-momentum 0.9", "--calibrate-steps=8"),
    ("--calibrate-steps=8 --calibrate-every 5 --lr 1", "--calibrate-steps=8 --calibrate-every=5"),
    ("--forerun-steps 8 --lr 1", "--forerun-steps=8"),
    ("--forerun data.txt", "--forerun"),
    ("--forerun --calibrate entropy --calibrate-steps=9", "--forerun"),
])  # fmt: skip
def test_what_is_ours_is_taken(line: str, ours: str) -> None:
    assert flags.split(line.split()).flags == tuple(ours.split())


def test_the_alias_says_what_the_other_name_says() -> None:
    assert parse(*ALIAS) == parse(*ALL)


def test_the_entry_point_knows_every_option() -> None:
    assert tuple(flag.name for flag, _ in options()) == entry.OPTIONS


@given(st.text(max_size=200), st.text(max_size=20))
def test_a_run_id_is_a_file_name_and_the_same_on_every_rank(name: str, port: str) -> None:
    launch = {"TORCHELASTIC_RUN_ID": name or "x", "MASTER_PORT": port}
    ids = {ranks.run_id({**launch, "RANK": rank, "LOCAL_RANK": rank}) for rank in "0123"}
    assert len(ids) == 1
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}", ids.pop())


def test_restarts_and_launches_have_run_ids_of_their_own() -> None:
    launch = {"TORCHELASTIC_RUN_ID": "nightly", "MASTER_PORT": "29500"}
    long = {"TORCHELASTIC_RUN_ID": "n" * 90, "MASTER_PORT": "29500"}
    others = [
        {**launch, "TORCHELASTIC_RESTART_COUNT": "1"},
        {**launch, "MASTER_PORT": "29501"},
        {**launch, "WORLD_SIZE": "2"},
        {**launch, "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "WORLD_SIZE": "2"},
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "WORLD_SIZE": "2"},
        long,
        {**long, "MASTER_PORT": "29501"},
    ]
    assert len({ranks.run_id(each) for each in (launch, *others)}) == len(others) + 1


def test_the_examples_in_the_docstrings_hold() -> None:
    results = [doctest.testmod(module) for module in (flags, ranks, entry)]
    assert [result.attempted >= 1 for result in results] == [True] * 3
    assert [result.failed for result in results] == [0] * 3


def test_a_python_that_is_named_answers() -> None:
    for flag in (
        "--calibrate-python=/opt/answers/bin/python",
        "--forerun-python=/opt/answers/bin/python",
    ):
        assert parse(flag).companion_command[0] == "/opt/answers/bin/python"


def test_a_cluster_file_is_read_with_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text('{"num_cards": 2}')
    settings = parse(f"--calibrate-cluster={path}")
    assert settings.cluster == path and settings.nodes.values == {"num_cards": 2}
    assert not parse("--calibrate").nodes.values
    path.write_text('{"num_cards": 0}')
    with pytest.raises(ConfigError, match="num_cards 0"):
        parse(f"--calibrate-cluster={path}")
