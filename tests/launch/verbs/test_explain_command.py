"""``forerun explain`` on a recorded run: as text, as JSON, as a picture, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from forerun.calib.timeline.terms import Term
from forerun.launch.cli import ExitCode, main

RECORDED = Path(__file__).parents[2] / "golden" / "cpu_dp2"
Out = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A copy, where the fit is kept."""
    there = tmp_path_factory.mktemp("explained") / "run"
    shutil.copytree(RECORDED, there)
    return str(there)


def explain(capsys: Out, *words: str) -> str:
    assert main(["explain", *words]) == ExitCode.ANSWER
    return capsys.readouterr().out


def test_the_schema_lists_all_terms(capsys: Out) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--json-schema"])
    names = json.loads(capsys.readouterr().out)["$defs"]
    assert {t.value for t in Term} == {*names["terms"]["items"]["properties"]["term"]["enum"]}


def test_a_waterfall_is_a_picture_for_light_and_dark(
    home: str, tmp_path: Path, capsys: Out
) -> None:
    for words, ends in (
        (("tp2", "running"), ["B: DP2 mbs2", "A: TP2 mbs2"]),
        (("running",), ["step"]),
    ):
        file = tmp_path / f"{len(words)}.svg"
        explain(capsys, home, *words, "--svg", str(file))
        text = file.read_text()
        root = ElementTree.fromstring(text)
        names = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
        assert all(end in names for end in ends) and "attention" in names
        assert "prefers-color-scheme: dark" in text and "http" not in text.replace(
            "http://www.w3.org/2000/svg", ""
        )
        bars = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("x")]
        assert all(float(bar.get("width", "0")) > 0 for bar in bars)
