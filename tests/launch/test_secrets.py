"""Secrets in a user's arguments stay out of every file, W&B's own among them."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import wandb_file
from companion_settings import companion_settings

from forerun.calib.answers.request import Request
from forerun.calib.workload.config_json import encode
from forerun.calib.workload.run_options import OnAdvice

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "cpu_dp2"
SECRET = "PLANTEDqX7vPLANTED"
ARGUMENTS = (
    *("train.py", "--hub-token", SECRET, f"--api-key={SECRET}", "--vault", "a", SECRET),
    *(f"HF_TOKEN={SECRET}", "--load", f"https://me:{SECRET}@host/x", "--save", "there", SECRET),
)
USER = "planted-user"
PRIVATE = {"request.json", "answer.json", "decision.json", "stop.json", "stop-request.json"}
ANSWERED = """
import json, sys
from forerun.calib.workload.config_json import decode
from forerun.hooks.process.settings import CompanionSettings
from forerun.launch.companion._companion_loop import PATIENCE_S, CompanionLoop

beside = CompanionLoop(decode(CompanionSettings, json.loads(sys.argv[1])))
for step in range(3, 11):
    value = {"event": "step", "step": step, "time_s": 0.15, "gap_s": 0.0, "is_hooked": False,
             "window": 0, "is_after_window": False, "flags": [], "unix_s": 1000.0}
    beside.handle(value, 1000.0)
for window in range(2):
    beside.handle({"event": "window_closed", "window": window, "last_step": 10}, 1000.0)
    beside.poll(1001.0 + PATIENCE_S * (window + 1))
beside.finish(1200.0)
"""


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A directory with all that the companion writes, and what it said; the umask lets all read."""
    home = tmp_path_factory.mktemp("answered")
    shutil.copytree(GOLDEN / "records", home / "out" / "records")
    settings = companion_settings(
        home / "out", num_ranks=2, deadline_unix_s=900.0, host_argv=ARGUMENTS, steps=8,
        on_advice=OnAdvice.STOP,
    )  # fmt: skip
    encoded = {**encode(settings), "my_token": SECRET}
    environ = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "WANDB_API_KEY": "0" * 40,
        "MY_TOKEN": SECRET,
        "USER": USER,
    }
    done = subprocess.run(
        [sys.executable, "-c", ANSWERED, json.dumps(encoded)],
        capture_output=True,
        text=True,
        check=True,
        env=environ,
        umask=0o022,
        cwd=home,
    )
    return home, done.stdout + done.stderr


def inside(data: bytes) -> bytes:
    """The bytes of a file with every compressed part of it beside them."""
    out = [data]
    for match in re.finditer(rb"\x1f\x8b\x08", data):
        out.append(zlib.decompressobj(31).decompress(data[match.start() :]))
    return b"".join(out)


@pytest.mark.slow
def test_no_file_and_no_line_holds_a_secret(answered: tuple[Path, str]) -> None:
    home, output = answered
    assert "decision: stop" in output and SECRET not in output
    files = [path for path in home.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert names >= {"request.json", "decision.json", "report.html", "samples.parquet"}
    holding = [path.name for path in files if SECRET.encode() in inside(path.read_bytes())]
    assert holding == []
    decision = json.loads((home / "out" / "latest" / "decision.json").read_text())
    assert decision["command"][:3] == ["train.py", "--hub-token", "***"]
    assert "***" in decision["command_note"]
    assert "--save there ***" in " ".join(decision["command"])


@pytest.mark.slow
def test_files_with_arguments_are_their_owners_alone(answered: tuple[Path, str]) -> None:
    home, _ = answered
    paths = (home / "out" / "latest").glob("*.*")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths}
    assert {name for name, mode in modes.items() if mode == 0o600} == PRIVATE & set(modes)
    assert modes["report.html"] == modes["forecast.json"] == 0o644


@pytest.mark.slow
def test_our_own_wandb_run_is_offline_and_tells_nothing_of_the_machine(
    answered: tuple[Path, str],
) -> None:
    home, output = answered
    assert "calib/* (offline; wandb sync" in output
    (run,) = (home / "out" / "wandb").glob("offline-run-*/run-*.wandb")
    unwanted = [SECRET, "train.py", "my_token", "host_argv", sys.executable, USER]
    (wandb_run,) = [
        record.run for record in wandb_file.records(home / "out") if record.HasField("run")
    ]
    assert (wandb_run.host, wandb_run.project) == ("", "forerun")
    everything = {path: path.read_bytes() for path in (home / "out" / "wandb").rglob("*.*")
                  if path.is_file()}  # fmt: skip
    results = {(path.name, word) for path, data in everything.items() for word in unwanted
             if word.encode() in data}  # fmt: skip
    assert results == set()
    assert b"num_ranks" in everything[run], "what is allowed is there"
    assert not list(run.parent.glob("files/requirements.txt")) and not list(
        run.parent.glob("files/*metadata*")
    )


def test_a_request_of_an_older_version_is_masked_when_it_is_read() -> None:
    request = Request.from_json({"now_unix_s": 1.0, "host_argv": list(ARGUMENTS)})
    assert SECRET not in json.dumps(request.to_json())
