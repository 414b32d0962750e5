"""``collect.py`` on a CPU, and what ``judge.py`` makes of it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from forerun.benchmarks.gpu import collect, sweep
from forerun.benchmarks.gpu.bench import Bench
from forerun.benchmarks.gpu.judge import BARS, UNSEEN, page, read
from forerun.benchmarks.gpu.layouts import BASE, LAYOUTS, SHARDS, digest
from forerun.benchmarks.gpu.measure import HOMES
from forerun.benchmarks.gpu.scores import gains, scores, turn_costs

CLONES = os.environ.get("FORERUN_MEGATRON_CLONES", "")
SCRIPT = Path(collect.__file__)


def collected(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--cpu", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_each_part_ends_in_time():
    for part in (1, 2):
        limits_s = [each.limit_s for each in collect.MEASUREMENTS if each.part == part]
        assert 0 < sum(limits_s) <= collect.PART_S


def test_each_measurement_has_a_home_and_bars():
    names = {each.name for each in collect.MEASUREMENTS}
    assert names == HOMES.keys()
    # The sweep's own figures are scored together.
    of_scores = {"preflight", "predictions", "sweep", "shards", "turns"}
    assert names - of_scores <= {bar.measurement for bar in BARS}


def answer(frac: float, half: float = 0.05, **more: Any) -> dict[str, Any]:
    memory = {"total_nbytes": 1050, "overhead_nbytes": 50}
    return {"time_frac": frac, "time_frac_low": frac - half, "time_frac_high": frac + half,
            "memory": memory, **more}  # fmt: skip


def planted() -> dict[str, dict]:
    """A sweep whose host becomes slower by 10 % from the first run of the base to the last."""
    layouts = {BASE: answer(0.0), "mbs 4": answer(-0.2), "mbs 1": answer(0.01, 0.02)}
    layouts |= {"full": answer(0.3), "fp8": {"refused": "ConfigError: no"}}
    written = {"layouts": layouts, "offers": ["mbs 4", "mbs 1"], "made_unix_s": 5.0}
    written["shards"] = {"TP 8, mbs 1": {"forward_s": 1.0, "backward_s": 2.0}}
    truth = {"mbs 4": 0.82, "mbs 1": 1.4, "full": 1.3, "fp8": 0.7}
    runs = [{"name": BASE, "round": 1, "begun_unix_s": 10.0, "step_s": 1.0, "peak_nbytes": 1}]
    for at, (name, ratio) in enumerate([*truth.items(), *[*truth.items()][::-1]], 1):
        step_s = ratio * (1 + at / 90)
        runs.append({"name": name, "round": 1 + (at > 4), "begun_unix_s": 10.0 + at,
                     "step_s": step_s, "peak_nbytes": 1000})  # fmt: skip
    runs.append({"name": BASE, "round": 2, "begun_unix_s": 19.0, "step_s": 1.1, "peak_nbytes": 1})
    runs.append({"name": "mbs 8", "round": 1, "begun_unix_s": 20.0, "problem": "OutOfMemoryError"})
    sides = {f"{phase}_{kind}": [1.2, 1.2] for phase in ("forward", "backward")
             for kind in ("device_s", "host_s")}  # fmt: skip
    return {
        "predictions": {"state": "done", "figures": written},
        "sweep": {
            "state": "done",
            "figures": {
                "predictions_sha256": digest(json.loads(json.dumps(written))),
                "begun_unix_s": 9.0,
                "runs": runs,
            },
        },
        "shards": {"state": "done", "figures": {"shards": {"TP 8, mbs 1": sides}}},
        "turns": {
            "state": "done",
            "figures": {"steps_s": {"bare": [1.0, 1.1, 1.2], "hooked": [1.1, 1.2, 1.3, 9.0]}},
        },
    }


def test_gains_are_of_the_base_at_their_time():
    known = planted()
    measured = {one.name: one for one in gains(known)}
    assert measured.keys() == {"mbs 4", "mbs 1", "full"}  # what was refused has no gain
    assert measured["mbs 4"].measured == pytest.approx(-0.18)
    assert measured["mbs 4"].scatter_log == pytest.approx(0.0, abs=1e-9)
    assert measured["mbs 4"].memory_frac == pytest.approx(0.0)
    figures = scores(known)
    assert figures["num_gains"] == 3 and figures["num_wrong_signs"] == 0
    assert figures["gain_coverage"] == pytest.approx(2 / 3)
    assert figures["cannot_tell"] == pytest.approx(1 / 3)  # of three that differ by 10 % or more
    assert figures["regret"] == pytest.approx(0.0)  # fp8 is faster, and no plan offers it
    assert figures["base_drift"] == pytest.approx(0.1)
    assert figures["shard_error"] == pytest.approx(3.0 / 2.4 - 1)
    assert figures["hooked_frac"] == pytest.approx(0.1 / 1.1)


def test_an_offer_that_is_slower_has_a_regret():
    known = planted()
    known["predictions"]["figures"]["offers"] = ["mbs 1", "full"]
    assert scores(known)["regret"] == pytest.approx(1.4 / 0.82 - 1)


def test_predictions_changed_after_the_sweep_are_seen():
    known = planted()
    assert scores(known)["is_first"] == 1
    known["predictions"]["figures"]["layouts"]["mbs 1"] = answer(0.4)
    assert scores(known)["is_first"] == 0
    late = planted()
    late["sweep"]["figures"]["begun_unix_s"] = 4.0
    assert scores(late)["is_first"] == 0


def test_turns_are_compared_in_pairs():
    assert turn_costs({"hooked": [1.0]}) == {}
    cost, low, high = turn_costs({"bare": [1.0, 3.0, 5.0], "a": [1.5, 3.5, 5.5]})["a"]
    assert cost == low == high == pytest.approx(0.5 / 3)


def test_the_page_of_a_sweep():
    text, is_met = page(planted())
    assert not is_met
    assert "| scores | predictions were written before the sweep | 1 | at least 1 | met |" in text
    assert "| mbs 1 | +1.0% | -1.0% to +3.0% | +40.0% |" in text
    assert "| mbs 8 | OutOfMemoryError |" in text and "| fp8 | ConfigError: no |" in text
    assert "| two_ranks | not run |" in text and "| two_ranks | layouts" not in text


class Machine:
    """Stands for the runs of a sweep: a clock that each takes ten seconds of."""

    def __init__(self, bench: Bench) -> None:
        self.trained: list[tuple[str, ...]] = []
        self._bench = bench

    def fits(self, until_s: float = 0.0) -> bool:
        return self._bench.remaining_s - until_s > 10

    def run(self, words: Any, **_: Any) -> dict[str, Any]:
        self._bench.end_s -= 10
        self.trained.append(tuple(words))
        return {"problem": "OutOfMemoryError"} if "8" in words else {"step_s": 1.0}


def swept(tmp_path: Path, monkeypatch: Any, limit_s: float, **figures: Any) -> list[tuple]:
    bench = Bench(out=tmp_path / "sweep.json", work=tmp_path, end_s=1e9, is_cpu=True)
    bench.end_s = time.monotonic() + limit_s
    bench.figures |= figures
    written = {"words": {BASE: [], "a": ["1"], "b": ["2"], "c": ["8"], "d": ["4"], "e": ["5"]}}
    written |= {"offers": ["e"]}
    (tmp_path / "predictions.json").write_text(json.dumps({"figures": written}))
    monkeypatch.setattr(sweep, "Cases", Machine)
    monkeypatch.setattr(sweep, "words_of", lambda bench: [])
    sweep.sweep(bench)
    state = json.loads((tmp_path / "sweep.json").read_text())["figures"]
    assert state["predictions_sha256"] == digest(written)
    return [(run["name"], run["round"]) for run in state["runs"]]


def test_rounds_are_opposite_with_the_base_between(tmp_path, monkeypatch):
    first = [BASE, "e", "a", "b", "c", BASE, "d", BASE]
    second = ["d", BASE, "b", "a", "e", BASE]  # c failed
    assert swept(tmp_path, monkeypatch, 300) == [
        *((name, 1) for name in first), *((name, 2) for name in second)
    ]  # fmt: skip


def test_a_short_sweep_has_both_rounds_of_fewer(tmp_path, monkeypatch):
    assert swept(tmp_path, monkeypatch, 75) == [
        (BASE, 1), ("e", 1), ("a", 1), ("a", 2), ("e", 2), (BASE, 2)
    ]  # fmt: skip


def test_what_broke_the_process_is_left_out(tmp_path, monkeypatch):
    before = [{"name": BASE, "round": 1}, {"name": "e", "round": 1}]
    runs = swept(tmp_path, monkeypatch, 300, runs=before, running="a")
    assert ("a", 1) not in runs and runs.count(("e", 1)) == 1 and ("e", 2) in runs


def test_a_process_that_broke_is_started_anew(tmp_path, monkeypatch):
    """The next one reads what it had written."""
    calls = []

    def finished(command: Any, environ: Any, limit_s: float) -> tuple[int, str]:
        calls.append(limit_s)
        place = Path(command[command.index("--out") + 1])
        state = "done" if place.exists() else "begun"
        place.write_text(json.dumps({"state": state, "figures": {"n": len(calls)}}))
        return (0 if state == "done" else -11), "broken\n"

    monkeypatch.setattr(collect, "finished", finished)
    (tmp_path / "out").mkdir()
    each = collect.Measurement("sweep", 1, 60.0)
    outcome = collect.measure(each, tmp_path / "out", tmp_path, {}, is_cpu=True)
    assert (outcome["state"], outcome["figures"]) == ("done", {"n": 2})
    each = collect.Measurement("shards", 1, 20.0)
    outcome = collect.measure(each, tmp_path / "out", tmp_path, {}, is_cpu=True)
    assert (outcome["state"], outcome["why"], len(calls)) == ("failed", "broken", 3)


def test_an_engine_that_does_not_work_is_off_the_path(tmp_path, monkeypatch):
    """Megatron imports what is there, and ends if that cannot be loaded."""
    paths: dict[str, str] = {}

    def finished(command: Any, environ: Any, limit_s: float) -> tuple[int, str]:
        name, place = command[2], Path(command[command.index("--out") + 1])
        paths[name] = environ["PYTHONPATH"]
        figures = {"has_engine": is_working} if name == "preflight" else {}
        place.write_text(json.dumps({"state": "done", "figures": figures}))
        return 0, ""

    monkeypatch.setattr(collect, "finished", finished)
    environ = {"PYTHONPATH": "a", "GPU_REPORT_ENGINE": "engine"}
    for is_working, path in ((True, "engine:a"), (False, "a")):
        out = tmp_path / str(is_working)
        out.mkdir()
        for name in ("preflight", "base"):
            collect.measure(collect.Measurement(name, 1, 9.0), out, out, environ, is_cpu=False)
        assert paths == {"preflight": "engine:a", "base": path}


def test_an_unfinished_measurement_is_in_the_archive(tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "_PACK_S", 0.02)
    out, archive = tmp_path / "out", tmp_path / "a.tar.gz"
    out.mkdir()
    (out / "sweep.json").write_text(json.dumps({"state": "begun", "figures": {"runs": [1]}}))
    with collect.packed_often(out, archive):
        end_s = time.monotonic() + 20
        while not archive.exists() and time.monotonic() < end_s:
            time.sleep(0.01)
    assert dict(read(archive)) == {"sweep": {"state": "begun", "figures": {"runs": [1]}}}


def test_each_layout_is_other_words():
    assert len({*LAYOUTS.values()}) == len(LAYOUTS) and len({*SHARDS.values()}) == len(SHARDS)


@pytest.mark.nightly
@pytest.mark.skipif(not CLONES, reason="FORERUN_MEGATRON_CLONES names no folder of clones")
def test_megatron_is_swept_after_its_predictions(tmp_path):
    clone = sorted(path.parent for path in Path(CLONES).glob("*/pretrain_gpt.py"))[-1]
    names = ("base", "predictions", "sweep")
    options = ("--megatron", str(clone), "--stretch", "4", "--only", *names)
    done = collected(tmp_path / "out", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    known = dict(read(tmp_path / "out.tar.gz"))
    assert scores(known)["is_first"] == 1 and "base_drift" in scores(known)
    text, _ = page(known)
    assert "A rehearsal on a CPU" in text and text.rstrip().endswith(UNSEEN)
    assert f"sha256 {digest(known['predictions']['figures'])}" in done.stdout


@pytest.mark.nightly
def test_what_takes_too_long_ends_with_all_that_it_started(tmp_path):
    late = tmp_path / "late"
    child = f"import time, pathlib; time.sleep(9); pathlib.Path({str(late)!r}).touch()"
    code = (
        "import subprocess, sys, time; print('begun', flush=True);"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True);"
        "time.sleep(60)"
    )
    begun_s = time.monotonic()
    environ = os.environ | {"GPU_REPORT_RUN": tmp_path.name}
    ended, output = collect.finished([sys.executable, "-c", code], environ, 5.0)
    assert (ended, output.strip()) == (None, "begun")
    assert time.monotonic() - begun_s < 8.0
    time.sleep(8.0)
    assert not late.exists()


def test_without_an_installation_the_flags_are_there_all_the_same(tmp_path, monkeypatch):
    """``import torch`` needs to find an entry point beside the package."""
    monkeypatch.setattr(collect, "_is_installed", lambda: False)
    wheel = tmp_path / "wheels" / "carried-1-py3-none-any.whl"
    wheel.parent.mkdir()
    with ZipFile(wheel, "w") as packed:
        packed.writestr("carried.py", "VALUE = 7\n")
    with tarfile.open(wheel.with_name("more.tar.xz"), "w:xz") as packed:
        packed.add(wheel.parent, arcname="more")
    environ = collect.environment(tmp_path, wheel.parent)
    assert (tmp_path / "path" / "more" / wheel.name).exists()
    path = environ["PYTHONPATH"].split(os.pathsep)[0]
    (distribution,) = importlib.metadata.distributions(path=[path], name="forerun")
    entries = [(e.group, e.value) for e in distribution.entry_points if e.group == "torch.backends"]
    assert entries == [("torch.backends", "_forerun_autoload:load")]
    code = (
        "import carried, forerun, _forerun_autoload, forerun.benchmarks.gpu.collect as collect;"
        "print(carried.VALUE, collect.__file__)"
    )
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=True)
    assert done.stdout.split() == ["7", f"{path}/forerun/benchmarks/gpu/collect.py"]


def test_the_later_of_two_archives_counts(tmp_path):
    for name, value in (("a", 1), ("b", 0)):
        out = tmp_path / name
        out.mkdir()
        result = {"state": "done", "figures": {"num_zero_durations": value}, "wall_s": 1.0}
        (out / "moe.json").write_text(json.dumps(result))
        (out / "other.json").write_text("{}")
    script = SCRIPT.with_name("judge.py")
    places = [str(tmp_path / name) for name in ("a", "b")]
    command = [sys.executable, str(script), *places, "--out", str(tmp_path / "page.md")]
    assert subprocess.run(command, check=False).returncode == 1
    assert "| records of 0 ns | 0 | at most 0 | met |" in (tmp_path / "page.md").read_text()
