"""``forerun run``: codes, signals, and /proc afterwards; processes are real, torchrun is not.

Where a test says so it is: that its workers save, and that none of them stays, is its own doing.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from wrapped_launch import PATIENCE_S, Launch, Torchrun, is_alive, wait_until


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Reset signals that a shell makes background jobs ignore: processes here inherit that."""
    numbers = (signal.SIGINT, signal.SIGHUP)
    ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for pid in (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else ():
        if is_alive(int(pid)):  # a test has failed: its sleepers must not stay
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -ABRT $$", 134)]
)
def test_the_code_is_the_commands_own(home: Path, script: str, code: int) -> None:
    result, summary = Launch(home, "bash", "-c", script).end()
    assert (result, summary["exit_code"], summary["num_left"]) == (code, code, 0)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
@pytest.mark.parametrize("worker", ["plain", "saving"])
def test_a_signal_is_passed_on_once_and_leaves_nobody(home: Path, name: str, worker: str) -> None:
    launch = Torchrun(home, worker)
    number = getattr(signal, name)
    launch.process.send_signal(number)
    if name == "SIGTERM":
        time.sleep(0.1)
        launch.process.send_signal(number)
    code, summary = launch.end()
    assert (code, summary["signals"], summary["num_killed"]) == (1, [number], 0)
    assert (home / "pids.signals").read_text() == str(int(number))
    assert launch.alive_pids() == []
    saved = home / "pids.saved"
    assert (saved.read_text().count("saved") if saved.exists() else 0) == 2 * (worker == "saving")


def test_the_second_interrupt_does_not_wait_for_the_deaf(home: Path) -> None:
    launch = Torchrun(home, "deaf", options=("--grace=50s",))
    begin = time.monotonic()
    launch.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    launch.process.send_signal(signal.SIGINT)
    code, summary = launch.end()
    assert code == 137 and launch.alive_pids() == []
    assert time.monotonic() - begin < 40.0 and summary["num_killed"]


def test_who_ignores_sigterm_is_killed_after_the_grace(home: Path) -> None:
    launch = Torchrun(home, "deaf", options=("--grace=1s",))
    launch.process.send_signal(signal.SIGTERM)
    code, summary = launch.end()
    assert code == 137 and summary["num_killed"] and launch.alive_pids() == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGKILL", "SIGUSR1"])
@pytest.mark.parametrize("worker", ["saving", "deaf"])
def test_orphans_of_a_launcher_that_dies_are_ended(home: Path, name: str, worker: str) -> None:
    launch = Torchrun(home, worker, options=("--grace=2s",))
    number = getattr(signal, name)
    os.kill(launch.agent, number)
    code, summary = launch.end()
    assert code == 128 + number and launch.alive_pids() == []
    assert bool(summary["num_killed"]) is (worker == "deaf")
    assert (home / "pids.saved").exists() is (worker == "saving")


def test_a_wrapper_that_is_killed_takes_its_launcher_with_it(home: Path) -> None:
    launch = Torchrun(home, "saving")
    launch.process.kill()
    launch.process.communicate(timeout=PATIENCE_S)
    wait_until(lambda: launch.alive_pids() == [])
    assert (home / "pids.saved").read_text().count("saved") == 2


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_a_warning_without_a_session_ends_the_command(home: Path, name: str) -> None:
    launch = Torchrun(home, "saving")
    launch.process.send_signal(getattr(signal, name))
    code, summary = launch.end()
    assert (code, summary["signals"]) == (1, [signal.SIGTERM]) and name in str(summary["asked"])
    assert (home / "pids.saved").read_text().count("saved") == 2 and launch.alive_pids() == []


@pytest.mark.slow
def test_a_warning_becomes_a_request_that_no_later_launch_finds(home: Path) -> None:
    launch = Torchrun(
        home,
        *("saving", "--calibrate-dir=out", "--calibrate-on-advice=stop"),
        options=("--grace=3s", "--stop-patience=1s"),
    )
    launch.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: [*home.glob("out/runs/*/stop-request.json")])
    (request,) = home.glob("out/runs/*/stop-request.json")
    stop_request = json.loads(request.read_text())
    assert stop_request["launch_id"] == request.parent.name
    assert stop_request["rule"] == "request" and "SIGUSR1" in stop_request["reason"]
    assert not (home / "pids.signals").exists(), "the command must not have seen a signal yet"
    code, summary = launch.end()  # nobody answers here: SIGTERM after the patience
    assert (code, summary["signals"]) == (1, [signal.SIGTERM])
    assert launch.alive_pids() == [] and not request.exists()


STOPPING = """
import json, os, pathlib, sys, time
launch = os.environ["FORERUN_LAUNCH_ID"]
home = pathlib.Path("out/runs") / launch; home.mkdir(parents=True)
value = {"schema": 1, "launch_id": sys.argv[1] or launch, "run_id": "r", "iteration": 30,
         "unix_s": time.time() - 3600.0, "reason": "restart would save 3 h", "rule": sys.argv[2],
         "command": ["train.py", "--lr", "1", "--tensor-model-parallel-size", "2"]}
(home / "stop.json").write_text(json.dumps(value))
sys.exit(int(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("launch", "rule", "child", "options", "code"),
    [
        ("", "restart", "0", (), 93),
        ("", "deadline", "1", (), 93),
        ("", "restart", "0", ("--stop-exit-code=42",), 42),
        ("", "request", "0", (), 0),
        ("another", "restart", "0", (), 0),
        ("another", "restart", "5", (), 5),
    ],
)
def test_only_an_advised_stop_of_this_launch_is_93(
    home: Path, launch: str, rule: str, child: str, options: tuple[str, ...], code: int
) -> None:
    command = (sys.executable, "-S", "-c", STOPPING, launch, rule, child)
    result, summary = Launch(home, *command, "--calibrate-dir=out", options=options).end()
    assert (result, summary["child_code"]) == (code, int(child))
    assert (summary["stop"] is not None) is (launch == "")


@pytest.mark.parametrize("is_known", [True, False])
def test_an_advised_stop_leaves_a_script_that_starts_the_advised_layout(
    home: Path, is_known: bool
) -> None:
    (home / "train.py").write_text("import sys; print(sys.argv[1:])")
    (home / "launch.py").write_text(STOPPING)
    command = [sys.executable, "launch.py", "", "restart", "0", "train.py", "--lr", "1"]
    if not is_known:
        # The session kept no value of an option that it does not know; the wrapper has it.
        (home / "launch.py").write_text(STOPPING.replace('"--lr", "1"', '"--pin", "***"'))
        command[-2:] = ["--pin", "PLANTED"]
    launch = Launch(home, *command, "--calibrate", "--calibrate-dir=out")
    code, summary = launch.end()
    assert "PLANTED" not in json.dumps(summary) + launch.err
    script = home / "out" / "resubmit.sh"
    (archived_script,) = home.glob("out/runs/*/resubmit.sh")
    assert code == 93 and stat.S_IMODE(script.stat().st_mode) == 0o700
    assert (
        home / str(summary["resubmit"]) == script
        and archived_script.read_bytes() == script.read_bytes()
    )
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = " ".join(script.read_text().replace("\\\n", "").split())
    words = " ".join(command[5:])
    assert f"{words} --tensor-model-parallel-size 2 --calibrate --calibrate-dir=out" in text


SLEEPER = "import pathlib, time; pathlib.Path('up').touch(); time.sleep(60)"


@pytest.mark.slow
def test_it_saves_before_the_limit_only_where_that_is_wanted(home: Path) -> None:
    command = (sys.executable, "-S", "-c", SLEEPER)
    limit = ("--time-limit=3s", "--margin=1s", "--grace=1s")
    saving = Launch(home, *command, options=(*limit, "--save-before-limit"))
    code, summary = saving.end()
    assert code == 143 and "before the limit" in str(summary["asked"])
    warning = Launch(home, "sleep", "4", options=limit)
    code, summary = warning.end()
    assert (code, summary["asked"]) == (0, "") and "--save-before-limit" in warning.err


def test_the_session_is_told_the_limit_and_workers_have_time_to_save(home: Path) -> None:
    show = "echo $FORERUN_LIMIT_UNIX_S $TORCH_ELASTIC_SHUTDOWN_TIMEOUT > seen"
    begin = time.time()
    Launch(home, "bash", "-c", show, options=("--time-limit=1h", "--grace=90s")).end()
    limit, timeout = (home / "seen").read_text().split()
    assert begin + 3599 <= float(limit) <= time.time() + 3600 and timeout == "89"


FORECAST = """
import json, os, pathlib, time
launch = os.environ["FORERUN_LAUNCH_ID"]
home = pathlib.Path("out/runs") / launch; home.mkdir(parents=True)
of = {"launch_id": launch}
(home / "request.json").write_text(json.dumps({**of, "save_times_s": [60.0, 90.0]}))
(home / "forecast.json").write_text(json.dumps({**of, "now_unix_s": time.time(),
    "steps_done": 20, "steps_left": 80, "remaining_s": 36000.0, "remaining_high_s": 40000.0}))
raise SystemExit(1)
"""


def test_the_next_job_is_as_long_as_what_is_left(home: Path) -> None:
    command = (sys.executable, "-S", "-c", FORECAST)
    options = ("--directory=out", "--time-limit=5h", "--margin=10m", "--job-time=4h")
    launch = Launch(home, *command, options=options)
    code, summary = launch.end()
    result = summary["suggestion"]
    assert code == 1 and isinstance(result, dict)
    # 40,000 s, a save of 90 s, 600 s to spare, start-up below a minute: 11 h 18 min, so 11 h 30.
    assert result["time"] == "11:30:00" and result["num_jobs"] == 3
    # Half of the time that is expected to be left passes before the limit: 20 % + 80 % / 2.
    assert "60 % done at the limit" in launch.err


REAL_WORKER = """
import os, pathlib, signal, subprocess, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
child = subprocess.Popen(["sleep", "60"])
with open("pids", "a") as out:
    out.write(f"{os.getpid()} {child.pid}\\n")
while not asked:
    time.sleep(0.02)
time.sleep(1)
with open("pids.saved", "a") as out:
    out.write("saved\\n")
child.kill()
raise SystemExit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGKILL"])
def test_workers_of_a_real_torchrun_save_and_nobody_stays(home: Path, name: str) -> None:
    pytest.importorskip("torch")
    (home / "worker.py").write_text(REAL_WORKER)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=2")
    launch = Launch(home, *torchrun, "--nproc-per-node=2", "worker.py", options=("--grace=20s",))
    pids = home / "pids"
    wait_until(lambda: pids.exists() and pids.read_text().count("\n") == 2)
    number = getattr(signal, name)
    if name == "SIGKILL":  # torchrun itself, as for want of memory: its workers are orphans
        worker = int(pids.read_text().split()[0])
        os.kill(int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1]), 9)
    else:
        launch.process.send_signal(number)
    code, summary = launch.end()
    assert code == (137 if name == "SIGKILL" else 1), launch.err
    assert (home / "pids.saved").read_text().count("saved") == 2
    assert summary["num_killed"] == 0
    assert [pid for pid in map(int, pids.read_text().split()) if is_alive(pid)] == []


RECIPE = Path(__file__).parents[3] / "recipes" / "pretrain_gpt.py"
TINY = (
    *("--num-layers", "2", "--hidden-size", "32", "--seq-length", "32", "--micro-batch-size", "2"),
    *("--global-batch-size", "8", "--train-iters", "100000", "--save", "ck"),
    *("--save-interval", "100000", "--distributed-backend", "gloo", "--log-interval", "50"),
)


@pytest.mark.slow
def test_a_warning_makes_a_real_run_save_and_stop(home: Path) -> None:
    pytest.importorskip("megatron.core")
    launch = Launch(
        home,
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(str(RECIPE), *TINY, "--calibrate", "--calibrate-steps=4", "--calibrate-dir=out"),
        *("--calibrate-device=cpu", "--calibrate-wandb=off"),
        options=("--time-limit=30m", "--grace=30s"),
    )
    wait_until(lambda: (home / "out" / "latest" / "report.html").exists())
    launch.process.send_signal(signal.SIGUSR1)
    code, summary = launch.end()
    stop, suggestion = summary["stop"], summary["suggestion"]
    assert isinstance(stop, dict) and isinstance(suggestion, dict)
    assert (code, summary["signals"], stop["rule"]) == (0, [], "request")
    last = int((home / "ck" / "latest_checkpointed_iteration.txt").read_text())
    assert last == stop["iteration"] > 7
    # 100,000 steps do not fit into 30 minutes.
    assert "% done at the limit" in launch.err and suggestion["num_jobs"] != 1


def test_dry_run_starts_nothing(home: Path) -> None:
    code, summary = Launch(home, "touch", "started", options=("--dry-run",)).end()
    assert code == 0 and summary["command"] == ["touch", "***"]
    assert not (home / "started").exists()


@pytest.mark.parametrize(("command", "code"), [(("no-such-program",), 127), (("/etc/hosts",), 126)])
def test_what_cannot_be_started_has_the_shells_code(
    home: Path, command: tuple[str, ...], code: int
) -> None:
    launch = Launch(home, *command)
    assert launch.end()[0] == code and launch.err.count("\n") == 1


def test_it_needs_the_standard_library_alone() -> None:
    code = (
        "import sys; from forerun.launch.cli import main; main(['run', '--', 'true']); "
        "print(sorted(set(sys.modules) & {'torch', 'numpy', 'pandas', 'wandb', 'rich'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_a_command_it_is_a_usage_error(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "forerun.launch.cli", "run"],
        capture_output=True,
        text=True,
        check=False,
        cwd=home,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
