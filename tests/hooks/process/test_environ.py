"""Values of the environment are input: whatever they are, nothing fails, and a remark says so."""

from __future__ import annotations

import ast
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("torch")

from forerun.calib.errors import ConfigError
from forerun.hooks.control.live import companion_settings
from forerun.hooks.process.ranks import current_rank
from forerun.hooks.process.settings import RankInfo, Settings, environ_number
from forerun.launch.options import flags
from forerun.launch.store.launch_files import launch_id
from forerun.launch.wrapper.slurm import from_environment

ROOT = Path(__file__).parents[3]
NUMBERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"),
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_ID"),
    *("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
    *("SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME", "FORERUN_LIMIT_UNIX_S"),
)
ODD = st.sampled_from(["", "many", "-1", "1e3", "nan", "inf", "0x10", "8(x2)", "³", "٣", " 4", "4"])
SETTINGS = Settings(
    rank=RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, run_id="r")
)


@given(environ=st.dictionaries(st.sampled_from(NUMBERS), ODD | st.text(max_size=5)))
@example(environ={"TORCHELASTIC_RESTART_COUNT": "many"})
@example(environ={"SLURM_JOB_START_TIME": "nan", "SLURM_JOB_END_TIME": "inf"})
def test_no_value_of_the_environment_is_a_fault(environ: dict[str, str]) -> None:
    settable = {name: value for name, value in environ.items() if "\0" not in value}
    with mock.patch.dict(os.environ, settable):
        assert companion_settings(SETTINGS, has_host_wandb=False).num_restarts >= 0
        assert current_rank().local_world_size >= 1
    launch_id(environ)
    allocated = from_environment(environ, "7")
    assert allocated is None or math.isfinite(allocated.start_unix_s or 0.0)
    try:
        flags.parse((), environ, (), ())
    except ConfigError as err:
        assert "\n" not in str(err).splitlines()[0]


def test_what_is_no_number_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    environ = {"FIRST": "many", "SECOND": "4"}
    assert environ_number(environ, ("FIRST", "SECOND"), 1) == 4
    assert environ_number(environ, ("THIRD",), 1) == 1
    assert caplog.messages == ["[forerun] FIRST='many' is no whole number, and is ignored"]


def conversions(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield conversions of variables to numbers that are neither tried nor checked."""
    tried = {id(one) for t in ast.walk(tree) if isinstance(t, ast.Try) for one in ast.walk(t)}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and id(call) not in tried:
            read = {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(call)}
            if call.func.id in ("int", "float") and "environ" in read:
                yield call


@pytest.mark.parametrize("folder", ["hooks", "launch"])
def test_no_variable_becomes_a_number_unchecked(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for call in conversions(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found
