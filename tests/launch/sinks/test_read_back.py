"""One recorded run through all sinks: each read by its own reader, all with the same values."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import wandb_file
from companion_settings import companion_settings
from status_server import has_openssl, status_server

from forerun.calib.records.run_values import RUN_VALUES
from forerun.calib.workload.run_options import Switch
from forerun.hooks.process.host_wandb import ATTACHED, CompanionFiles, HostWandb
from forerun.hooks.process.settings import CompanionSettings
from forerun.launch.companion._companion_loop import CompanionLoop
from forerun.launch.sinks.prometheus_sink import prometheus_name

pytest.importorskip("wandb")
pytest.importorskip("tensorboard")
parser = pytest.importorskip("prometheus_client.parser")

pytestmark = pytest.mark.skipif(not has_openssl(), reason="no openssl for a certificate")
GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
WINDOW_END, LAST = 11, 16
BEGIN_UNIX_S, STEP_S = 1_795_000_000.0, 0.15
SCONTROL = '#!/bin/sh\nprintf "%s\\n" "$@" >> "$SCONTROL_LOG"\n'
CONSTANTS = {name for name, value in RUN_VALUES.items() if value.is_constant}


def moment(step: int) -> float:
    return BEGIN_UNIX_S + STEP_S * step


@dataclass
class Read:
    """Results of each reader."""

    home: Path
    companion: CompanionSettings
    output: str
    posts: list[dict[str, Any]]
    comments: list[str]

    @property
    def rows(self) -> dict[int, dict[str, Any]]:
        """W&B: rows by step."""
        return dict(wandb_file.history(self.companion.settings.directory))

    @property
    def values(self) -> dict[int, dict[str, float]]:
        """W&B: values of steps by step, less the name of the run's own."""
        return {
            step: {name.removeprefix("calib/"): row[name] for name in row
                   if name.removeprefix("calib/") in RUN_VALUES}
            for step, row in self.rows.items()
        }  # fmt: skip

    @property
    def last(self) -> dict[str, float]:
        """W&B: the newest of each value."""
        result: dict[str, float] = {}
        for _, row in sorted(self.values.items()):
            result |= row
        return result


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Read]:
    home = tmp_path_factory.mktemp("sinks")
    out, tools = home / "out", home / "tools"
    shutil.copytree(GOLDEN / "records", out / "records")
    tools.mkdir()
    (tools / "scontrol").write_text(SCONTROL)
    (tools / "scontrol").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch, status_server(home) as server:
        for name, value in {
            **server.environ,
            "SLURM_JOB_ID": "7",
            "SCONTROL_LOG": str(home / "comments"),
            "PATH": f"{tools}:{os.environ['PATH']}",
            "HOME": str(home / "user"),
            "WANDB_DATA_DIR": str(home / "wandb-data"),
            "WANDB_CACHE_DIR": str(home / "wandb-cache"),
        }.items():
            patch.setenv(name, value)
        lines: list[str] = []
        patch.setattr("forerun.launch.companion._companion_loop.log_line", lines.append)
        settings = companion_settings(
            out, num_steps=60, prometheus=home / "forerun.prom", slurm_comment=Switch.ON
        )
        run_through(replace(settings, started_unix_s=BEGIN_UNIX_S))
        words = (home / "comments").read_text().splitlines()
        comments = [word for word in words if word.startswith("Comment=")]
        yield Read(home, settings, "\n".join(lines), server.taken, comments)


def run_through(
    settings: CompanionSettings, trained: Callable[[dict[str, Any]], object] = lambda _: None
) -> None:
    """The recorded run's events, in the order of training; ``trained`` has each step's first."""
    loop = CompanionLoop(settings)

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            event = {
                "event": "step", "step": step, "time_s": STEP_S + 0.001 * step,
                "is_hooked": False, "flags": [], "window": 0 if step < WINDOW_END else None,
                "is_after_window": step >= WINDOW_END, "unix_s": moment(step + 1),
            }  # fmt: skip
            trained(event)
            loop.handle(event, moment(step + 1))

    steps(0, WINDOW_END + 1)
    closed = {"event": "window_closed", "window": 0, "last_step": WINDOW_END - 1}
    loop.handle(closed, moment(WINDOW_END + 1))
    loop.poll(moment(WINDOW_END + 2))
    steps(WINDOW_END + 1, LAST)
    loop.finish(moment(LAST + 1))


def test_every_value_is_in_the_table_and_every_row_has_the_time_of_its_step(read: Read) -> None:
    assert sorted(read.rows) == list(range(1, LAST + 1))
    for step, row in read.rows.items():
        assert row["_timestamp"] == pytest.approx(moment(step), abs=1e-3)
        assert row["calib/unix_s"] == row["_timestamp"]
        assert row["calib/iteration"] == step
        named = {name for name in row if name.startswith("calib/") and "." not in name}
        assert {name.removeprefix("calib/") for name in named} <= RUN_VALUES.keys()
    assert {"eta_h", "progress_frac", "tokens_per_s", "finish_p50_unix_s"} <= read.last.keys()


def test_the_end_comes_nearer_and_progress_grows(read: Read) -> None:
    after = [read.values[step] for step in range(WINDOW_END + 2, LAST + 1)]
    hours = [row["finish_p50_unix_s"] - row["unix_s"] for row in after]
    assert [row["eta_h"] for row in after] == pytest.approx([s / 3600 for s in hours])
    shares = [row["progress_frac"] for row in after]
    assert shares == sorted(shares) and 0.0 < shares[0] < shares[-1] <= 1.0


def test_a_constant_is_sent_once(read: Read) -> None:
    decided = {"is_stop_advised", "stop_probability"}
    assert {"num_steps", "overhead_frac", "overhead_below_frac"} | decided == CONSTANTS
    rows = [row for _, row in sorted(read.values.items())]
    sent = {name: [row[name] for row in rows if name in row] for name in CONSTANTS}
    # The cost of hooks is a value or a bound.
    assert sent["num_steps"] and sent["overhead_frac"] + sent["overhead_below_frac"]
    for sent_values in sent.values():
        assert len(sent_values) == len(set(sent_values)), "again only where it has changed"


def test_wandb_draws_ours_over_our_steps_and_has_numbers_and_files(read: Read) -> None:
    records = [*wandb_file.records(read.companion.settings.directory)]
    metrics = [record.metric for record in records if record.HasField("metric")]
    (ours,) = [metric for metric in metrics if metric.glob_name]
    assert (ours.glob_name, ours.step_metric) == ("calib/*", "calib/iteration")
    artifacts = [record.artifact for record in records if record.HasField("artifact")]
    (report,) = [result for result in artifacts if result.type == "forerun"]
    names = {entry.path for entry in report.manifest.contents}
    assert names == {"report.html", "timeline.json.gz"}
    tables = {path.name.split("_")[0]: json.loads(path.read_text())
              for path in (read.home / "out" / "wandb").rglob("*.table.json")}  # fmt: skip
    layouts = tables["layouts"]
    place = layouts["columns"].index("step (s)")
    assert all(isinstance(row[place], float) for row in layouts["data"])
    for table in tables.values():
        assert len(set(table["columns"])) == len(table["columns"])


def test_tensorboard_reads_the_same_at_the_same_steps_and_times(read: Read) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    (path,) = (read.companion.settings.directory / "tensorboard" / "golden-run").iterdir()
    result: dict[int, dict[str, float]] = {}
    for event in LegacyEventFileLoader(str(path)).Load():
        for value in event.summary.value:
            name = value.tag.removeprefix("calib/")
            if name not in RUN_VALUES:
                continue
            assert event.wall_time == pytest.approx(moment(event.step), abs=1e-3)
            number = value.simple_value
            if value.HasField("tensor"):
                number = make_ndarray(value.tensor).item()
            result.setdefault(event.step, {})[name] = number
    without = ("unix_s", "iteration")
    for step, row in read.values.items():
        ours = {name: row[name] for name in row if name not in without}
        assert result[step].keys() == ours.keys()
        for name, number in ours.items():
            is_precise = name.endswith("unix_s")
            assert result[step][name] == pytest.approx(number, rel=0.0 if is_precise else 1e-6)


def test_tensorboard_shows_scalars_and_tables(read: Read) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = read.companion.settings.directory / "tensorboard" / "golden-run"
    shown = EventAccumulator(str(folder)).Reload()
    scalars = {point.step: point.value for point in shown.Scalars("calib/step_time_s")}
    assert scalars == {step: pytest.approx(row["step_time_s"]) for step, row in read.values.items()}
    (event,) = shown.Tensors("calib/layouts")
    assert event.tensor_proto.string_val[0].startswith(b"| # | layout | step (s) |")


def test_prometheus_reads_the_newest_of_each_value_in_base_units(read: Read) -> None:
    text = (read.home / "forerun.prom").read_text()
    families = {one.name: one for one in parser.text_string_to_metric_families(text)}
    assert all(one.type == "gauge" and one.documentation for one in families.values())
    samples = {name: one.samples for name, one in families.items()}
    for name, value in read.last.items():
        theirs, factor = prometheus_name(name)
        (sample,) = samples.pop(theirs)
        assert sample.value == pytest.approx(value * factor, rel=1e-12)
        assert sample.labels == {"run_id": "golden-run", "launch": ""}
    assert samples == {}, "and nothing else"
    assert "forerun_step_time_seconds" in families and "forerun_eta_seconds" in families


def test_the_trainjob_has_the_newest_of_each_value_by_kubeflows_schema(read: Read) -> None:
    for body in read.posts:
        status = body["trainerStatus"]
        assert {*status} <= {"progressPercentage", "estimatedRemainingSeconds", "metrics",
                             "lastUpdatedTime"}  # fmt: skip
        assert len(status["metrics"]) <= 256
        for metric in status["metrics"]:
            assert metric.keys() == {"name", "value"}
            assert all(isinstance(text, str) and 1 <= len(text) <= 64 for text in metric.values())
        datetime.fromisoformat(status["lastUpdatedTime"].replace("Z", "+00:00"))
    status, last = read.posts[-1]["trainerStatus"], read.last
    metrics = {metric["name"]: float(metric["value"]) for metric in status["metrics"]}
    assert metrics == {f"calib/{name}": value for name, value in last.items()}
    assert status["progressPercentage"] == math.floor(100 * last["progress_frac"])
    assert isinstance(status["progressPercentage"], int)
    assert status["estimatedRemainingSeconds"] == round(3600 * last["eta_h"])
    updated_at = datetime.fromisoformat(status["lastUpdatedTime"].replace("Z", "+00:00"))
    assert updated_at.timestamp() == math.floor(last["unix_s"])


def test_the_comment_says_progress_end_and_step(read: Read) -> None:
    last = read.comments[-1]
    assert last.startswith(
        f"Comment=forerun: {math.floor(100 * read.last['progress_frac'])} % · ends "
    )
    assert last.endswith(" s") or last.endswith(" ms")
    assert "JobId=7" in (read.home / "comments").read_text().splitlines()


def test_the_log_says_where_and_nothing_failed(read: Read) -> None:
    (line,) = [line for line in read.output.splitlines() if line.startswith("report: ")]
    for where in ("TensorBoard: ", "Prometheus: ", "TrainJob: status by localhost", "Slurm: "):
        assert where in line
    assert "is off" not in read.output and "tried again" not in read.output


def keys_of(directory: Path) -> dict[str, set[str]]:
    """Return names in an offline run's rows and summary, and the files of its artifacts."""
    result: dict[str, set[str]] = {"rows": set(), "summary": set(), "artifacts": set()}
    for record in wandb_file.records(directory):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            result["rows"] |= {i.key or ".".join(i.nested_key) for i in record.history.item}
        elif kind == "summary":
            result["summary"] |= {i.key or i.nested_key[0] for i in record.summary.update}
        elif kind == "artifact" and record.artifact.type == "forerun":
            result["artifacts"] |= {entry.path for entry in record.artifact.manifest.contents}
    names = {name for name in result["rows"] if name.startswith("calib/")}
    ours = {name for name in result["summary"] if name.startswith("calib/")}
    return result | {"rows": names, "summary": ours}


def test_the_hosts_run_has_all_that_ours_has(
    read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every value, table, number of the score and file of the report; the host closes its run last.

    The host's run is W&B's own, offline, in this process, and logs its loss in between.
    """
    import wandb

    out = tmp_path / "out"
    shutil.copytree(GOLDEN / "records", out / "records")
    settings = replace(read.companion, settings=replace(read.companion.settings, directory=out))
    settings = replace(settings, has_host_wandb=True, launch_id="launch-1")
    monkeypatch.setattr("forerun.launch.companion._companion_loop.log_line", lambda _: None)
    with wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True)) as run:
        files = CompanionFiles(out, lambda: settings.launch_id)
        host = HostWandb(files)

        def newest() -> float:
            return files.output.values.get("unix_s", 0.0)

        def trained(event: dict[str, Any]) -> None:
            run.log({"loss": 1.0}, step=event["step"] + 1)
            until = time.monotonic() + 30.0
            while event["step"] > WINDOW_END and newest() < moment(event["step"]) - 1e-3:
                assert time.monotonic() < until
                time.sleep(0.05)
                host.poll()
            host.log(
                step=event["step"],
                time_s=event["time_s"],
                is_after_window=event["is_after_window"],
                unix_s=event["unix_s"],
            )

        run_through(settings, trained)
        host.poll(is_final=True)
    wandb_file.await_end(tmp_path)
    ours, theirs = keys_of(read.companion.settings.directory), keys_of(tmp_path)
    assert ours["artifacts"] == set(ATTACHED)
    assert {"calib/operators.nrows", "calib/step_time_modelled_s"} <= ours["rows"]
    assert {"calib/num_scored_steps", "calib/interval_coverage_frac"} <= ours["summary"]
    assert theirs == ours
