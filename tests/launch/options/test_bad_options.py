"""Options that no run can have end with one line and exit code 2, whatever the verb."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_copies import golden_copy

from forerun.launch.cli import ExitCode, main

GOLDEN = str(golden_copy("cpu_dp2"))


@pytest.mark.parametrize(
    "words",
    [
        "predict --gpus 0",
        "predict --gpus -3",
        "plan --gpus 0",
        "plan --top 0",
        "plan --top -1",
        "plan --memory-gib nan",
        "plan --memory-gib inf",
        "plan --memory-gib -1",
    ],
)
def test_one_line_and_a_code(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    verb, option, value = words.split()
    assert main([verb, GOLDEN, option, value]) == ExitCode.USAGE
    output = capsys.readouterr()
    assert output.out == ""
    assert option in output.err and value in output.err and len(output.err.splitlines()) == 1


def test_a_model_without_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 0})
    )
    assert main(["predict", GOLDEN, "--config", str(file)]) == ExitCode.USAGE
    assert "num_attention_heads 0 is below 1" in capsys.readouterr().err
