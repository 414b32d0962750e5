"""Which sinks open, by what was asked for and by what is there; and what the log says of each."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from companion_settings import companion_settings
from local_slurm import is_installed, local_slurm

from forerun.calib.workload.run_options import AutoSwitch, Switch
from forerun.launch.known.scheduler import ask_slurm
from forerun.launch.sinks.prometheus_sink import open_prometheus
from forerun.launch.sinks.registry import AllSinks
from forerun.launch.sinks.slurm_sink import SlurmComment, comment, open_slurm
from forerun.launch.sinks.tensorboard_sink import Events, open_tensorboard
from forerun.launch.sinks.trainjob_sink import TrainJob, open_trainjob

SERVER = {
    "URL": "https://trainer.kubeflow:8082/apis/status",
    "CA_CERT": "/var/run/ca.crt",
    "TOKEN": "/var/run/token",
}


def kubeflow(monkeypatch: pytest.MonkeyPatch, **changed: str) -> None:
    for end, value in {**SERVER, **changed}.items():
        monkeypatch.setenv(f"KUBEFLOW_TRAINER_SERVER_{end}", value)


def test_what_nobody_asked_for_is_not_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    settings = companion_settings(tmp_path, tensorboard=AutoSwitch.OFF)
    for opener in (open_tensorboard, open_prometheus, open_trainjob, open_slurm):
        assert opener(settings).where == ""
    assert [*tmp_path.iterdir()] == []


def test_event_files_lie_beside_the_hosts_else_in_our_directory(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    settings = companion_settings(tmp_path / "out", launch_id="launch-1")
    host = replace(settings, host_tensorboard=str(tmp_path / "host"))
    for given, folder in ((settings, "out/tensorboard/launch-1"), (host, "host/forerun")):
        sink = open_tensorboard(given)
        sink.close({})
        assert isinstance(sink, Events) and sink.where == str(tmp_path / folder)
        assert len([*(tmp_path / folder).glob("events.out.tfevents.*")]) == 1


def test_a_directory_that_cannot_be_written_is_no_fault_of_a_sink(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    (tmp_path / "file").write_text("not a directory")
    messages: list[str] = []
    settings = companion_settings(tmp_path / "file" / "out", wandb=AutoSwitch.ON)
    sinks = AllSinks(settings, messages.append)
    for name in ("W&B", "TensorBoard"):
        assert f"{name}: off (the directory cannot be written)" in sinks.where.split(" · ")
    sinks.step(1, {"step_time_s": 1.0})
    sinks.close({})
    assert messages == []


@pytest.mark.parametrize(
    ("wanted", "host", "is_missed"),
    [(AutoSwitch.AUTO, "", False), (AutoSwitch.AUTO, "/host", True), (AutoSwitch.ON, "", True)],
)
def test_a_missing_package_is_said_where_it_is_missed(
    wanted: AutoSwitch, host: str, is_missed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(
        "forerun.launch.sinks.tensorboard_sink.is_installed", lambda name: name != "tensorboard"
    )
    settings = replace(companion_settings(tmp_path, tensorboard=wanted), host_tensorboard=host)
    assert ("pip install tensorboard" in open_tensorboard(settings).where) == is_missed


def test_the_trainjob_is_reported_to_unless_training_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubeflow(monkeypatch)
    settings = companion_settings(tmp_path)
    sink = open_trainjob(settings)
    sink.close({})
    assert isinstance(sink, TrainJob) and sink.where == "status by trainer.kubeflow"
    theirs = replace(settings, has_host_trainjob=True)
    assert "training reports there itself" in open_trainjob(theirs).where
    requested = companion_settings(tmp_path, trainjob=AutoSwitch.ON)
    sink = open_trainjob(replace(requested, has_host_trainjob=True))
    sink.close({})
    assert isinstance(sink, TrainJob)
    assert open_trainjob(companion_settings(tmp_path, trainjob=AutoSwitch.OFF)).where == ""


def test_the_token_is_for_https_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubeflow(monkeypatch, URL="http://trainer.kubeflow/apis/status")
    assert "not https" in open_trainjob(companion_settings(tmp_path)).where


def test_a_trainjob_that_is_asked_for_and_not_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    settings = companion_settings(tmp_path, trainjob=AutoSwitch.ON)
    assert open_trainjob(settings).where.startswith("off (no KUBEFLOW_TRAINER_SERVER_URL")


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "7", "PATH": "/nowhere"}])
def test_a_comment_needs_a_job_and_its_command(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOBID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    settings = companion_settings(tmp_path, slurm_comment=Switch.ON)
    assert open_slurm(settings).where.startswith("off (no ")


def test_a_comment_that_is_refused_is_said_once() -> None:
    messages: list[str] = []
    sink = SlurmComment("7", lambda command: None)
    sink.notify = messages.append
    sink.step(1, {"step_time_predicted_s": 1.84, "progress_frac": 0.4, "unix_s": 0.0})
    sink.close({})
    assert messages == ["scontrol update was refused or did not answer; Forerun tries again"]


def test_a_comment_says_the_day_and_in_another_week_the_date() -> None:
    known = {"step_time_predicted_s": 1.84, "progress_frac": 0.4299, "unix_s": 1e9}
    soon = comment({**known, "finish_p50_unix_s": 1e9 + 3600.0})
    later = comment({**known, "finish_p50_unix_s": 1e9 + 30 * 86400.0})
    assert soon == "forerun: 42 % · ends Sun 02:46 UTC · step 1.840 s"
    assert later == "forerun: 42 % · ends Tue 9 Oct 01:46 UTC · step 1.840 s"
    assert comment({"progress_frac": 0.4}) == ""


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason="no Slurm can be started here")
def test_slurm_keeps_the_comment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_slurm(tmp_path) as slurm:
        job_id = slurm.submit("sleep 60\n")
        monkeypatch.setenv("SLURM_CONF", slurm.environ["SLURM_CONF"])
        sink = SlurmComment(job_id, ask_slurm)
        sink.step(1, {"step_time_predicted_s": 1.84, "progress_frac": 0.4, "unix_s": 0.0})
        sink.close({})
        shown = slurm.ask("scontrol", "show", "job", "-o", job_id)
        assert "Comment=forerun: 40 % · step 1.840 s" in shown
        slurm.ask("scancel", job_id)
