"""The command line as a shell sees it: exit codes, one line per error, JSON on request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.calib.workload.choices import NAMED_CHOICES
from forerun.launch.cli import ExitCode, build_parser, main


@pytest.mark.parametrize("verb", ["report", "predict", "plan"])
def test_an_empty_directory_is_no_data(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, str(tmp_path)]) == ExitCode.NO_DATA
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--calibrate" in err


@pytest.mark.parametrize(
    ("word", "message"), [("paln", "did you mean plan"), ("guess", "there are report, predict")]
)
def test_an_unknown_verb_is_one_line(
    word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word, "DIR"]) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"{word!r} is not a verb" in err and message in err


def test_who_asks_nothing_sees_what_can_be_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line is a command of a verb that is there, and fits on a narrow screen."""
    assert main([]) == ExitCode.ANSWER
    lines = capsys.readouterr().out.splitlines()
    verbs = build_parser()._subparsers._group_actions[0].choices
    listed_verbs = [
        line.partition("  forerun ")[2].split()[0] for line in lines if "  forerun " in line
    ]
    assert len(listed_verbs) > 5 and set(listed_verbs) <= set(verbs)
    assert max(map(len, lines)) <= 80


def test_the_public_names_are_listed() -> None:
    import forerun

    assert set(forerun.__all__) <= set(dir(forerun))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan DIR --gpu 8", "did you mean --gpus"),
        ("plan DIR --tp 8", "write --keep tp=VALUE"),
        ("plan DIR --objctive=cost", "did you mean --objective"),
        ("report DIR --zzz", "see forerun report --help"),
        ("report DIR more", "see forerun report --help"),
        ("report --device B200 DIR", "predict, plan, import, explain, doctor do"),
        ("predict DIR --device", "--device: expected one argument; see forerun predict --help"),
        ("predict --tp 8", "required: DIR; see forerun predict --help"),
        ("predict --device B200", "give its command after --, or --config FILE"),
        ("import zip FILE --out O", "there are kineto, nccl-tests, nccl-inspector, steps"),
        ("--verson", "did you mean --version"),
        ("--json report DIR", "the verb comes first"),
    ],
)
def test_an_option_that_a_verb_does_not_take_is_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(words.split())
    except SystemExit as stop:
        code = stop.code
    assert code == ExitCode.USAGE
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err


def test_the_parser_of_a_verb_is_built_where_it_is_asked() -> None:
    def verbs(*words: str) -> list[str]:
        return [*build_parser(words)._subparsers._group_actions[0].choices]

    assert verbs("plan", "DIR") == ["plan"]
    assert set(verbs("--help")) == set(verbs()) > {"plan", "run"}


def test_every_axis_of_a_layout_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["predict", "--help"])
    words = capsys.readouterr().out.replace(",", " ").split()
    assert {name for axis in NAMED_CHOICES for name in axis.spellings} <= set(words)


def test_doctor_tells_versions_and_the_entry_point(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    value = json.loads(capsys.readouterr().out)
    result = {row["name"]: row for row in value["findings"]}
    assert result["python"]["value"] == ".".join(str(v) for v in sys.version_info[:3])
    assert result["flag"]["verdict"] == "ok"
    assert code == (1 if any(r["verdict"] == "missing" for r in value["findings"]) else 0)


def test_doctor_warns_of_two_distributions_of_xgboost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from importlib import metadata

    from forerun.launch.verbs import doctor

    real = metadata.version
    monkeypatch.setattr(
        doctor.metadata, "version", lambda name: "3.2.0" if name == "xgboost" else real(name)
    )
    row = next(f for f in doctor.examine() if f.name == "trees")
    assert row.verdict is doctor.Severity.WARN and "xgboost-cpu" in row.remedy
    assert row.value.startswith("xgboost 3.2.0 and xgboost-cpu")


@pytest.mark.slow
@pytest.mark.parametrize("verb", [("doctor", "--json"), ("status", "."), ("nothing",)])
def test_an_output_that_is_gone_or_full_is_one_line_and_no_traceback(
    verb: tuple[str, ...], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "forerun.launch.cli", *verb]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, cwd=tmp_path, text=True, check=False
        )
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
        expected = (2, 3) if verb[0] != "doctor" else (2,)
        assert done.returncode in expected
        silent = subprocess.run(command, stdout=full, stderr=full, cwd=tmp_path, check=False)
        assert silent.returncode in expected
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, cwd=tmp_path, text=True, check=False
    )
    os.close(writing)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert done.returncode in (0, 2, 3)
