"""When a run of our own on W&B leaves the machine: only where the user has asked for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from companion_settings import companion_settings

from forerun.calib.workload.run_options import AutoSwitch
from forerun.launch.sinks.sink import Sink
from forerun.launch.sinks.wandb_sink import open_wandb, run_mode

KEY = {"WANDB_API_KEY": "0" * 40}
NO_KEY = {"NETRC": "/nowhere"}


@pytest.mark.parametrize(
    ("wanted", "environ", "mode"),
    [
        (AutoSwitch.AUTO, KEY, "offline"),
        (AutoSwitch.AUTO, {**KEY, "WANDB_MODE": "online"}, "offline"),
        (AutoSwitch.AUTO, {**KEY, "WANDB_MODE": "disabled"}, "disabled"),
        (AutoSwitch.ON, KEY, "online"),
        (AutoSwitch.ON, NO_KEY, "offline"),
        (AutoSwitch.ON, {**KEY, "WANDB_MODE": "offline"}, "offline"),
        (AutoSwitch.ON, {**KEY, "WANDB_MODE": "dryrun"}, "offline"),
        (AutoSwitch.ON, {**KEY, "WANDB_MODE": "disabled"}, "disabled"),
        (AutoSwitch.ON, {**KEY, "WANDB_DISABLED": "true"}, "disabled"),
        (AutoSwitch.ON, {**NO_KEY, "WANDB_MODE": "online"}, "online"),
    ],
)
def test_online_only_where_the_flag_says_so_and_the_environment_lets_it(
    wanted: AutoSwitch, environ: dict[str, str], mode: str
) -> None:
    assert run_mode(wanted, environ) == mode


def test_a_user_who_has_switched_wandb_off_gets_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    sink = open_wandb(companion_settings(tmp_path, wandb=AutoSwitch.ON))
    assert type(sink) is Sink and "WANDB_MODE" in sink.where
    assert list(tmp_path.iterdir()) == []
