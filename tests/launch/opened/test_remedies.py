"""Remedies for a layout that does not fit: each fits if applied."""

from __future__ import annotations

import json
from typing import Any

import pytest
from json_schema import check

from forerun.launch.cli import ExitCode, main
from forerun.launch.verbs.arguments import ANSWERS

_7B = (
    "torchrun --nproc-per-node 8 --nnodes 8 pretrain_gpt.py --bf16 --num-layers 32 "
    "--hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings "
    "4096 --vocab-size 32000 --micro-batch-size 1 --global-batch-size 512"
)
_70B = (
    "torchrun --nproc-per-node 8 --nnodes 16 pretrain_gpt.py --bf16 --num-layers 80 "
    "--hidden-size 8192 --num-attention-heads 64 --seq-length 8192 --max-position-embeddings "
    "8192 --vocab-size 128256 --micro-batch-size 1 --global-batch-size 512 --swiglu "
    "--ffn-hidden-size 28672 --group-query-attention --num-query-groups 8"
)
Out = pytest.CaptureFixture[str]


def predict_answer(capsys: Out, line: str, *words: str) -> dict[str, Any]:
    command = ["predict", "--json", *words, "--", *line.split()]
    assert main(command) == ExitCode.ANSWER
    value = json.loads(capsys.readouterr().out)
    check(value, json.loads(ANSWERS.read_text(encoding="utf-8")))
    return value


@pytest.mark.parametrize("line", [_7B, _70B])
def test_each_remedy_fits_and_takes_as_long_as_it_says(line: str, capsys: Out) -> None:
    result = predict_answer(capsys, line, "--device", "H100")
    assert result["verdict"] == "does not fit" and result["largest_micro_batch"] is None
    changed = [one for one in result["remedies"] if "--device" not in one["options"]]
    assert len(changed) == 2 and changed[0]["slower_frac"] <= changed[1]["slower_frac"]
    for one in result["remedies"]:
        device = [] if "--device" in one["options"] else ["--device", "H100"]
        remedied = predict_answer(capsys, line, *device, *one["options"])
        assert remedied["verdict"] == "fits" and remedied["label"] == one["label"]
        assert remedied["memory"]["total_nbytes"] == one["total_nbytes"]
        assert remedied["step_time_s"] == pytest.approx(one["step_time_s"])
        slower = remedied["step_time_s"] / result["step_time_s"] - 1
        assert slower == pytest.approx(one["slower_frac"])


def test_the_largest_micro_batch_fits_and_twice_as_much_does_not(capsys: Out) -> None:
    base = ("--device", "H100", "--zero", "1", "--recompute", "full")
    result = predict_answer(capsys, _7B, *base)
    assert not result["remedies"]
    name, size = result["largest_micro_batch"]["options"]
    assert name == "--mbs" and int(size) > 1
    fitting = predict_answer(capsys, _7B, *base, "--mbs", size)
    assert fitting["verdict"] != "does not fit"
    assert fitting["largest_micro_batch"]["options"] == [name, size]
    twice = str(2 * int(size))
    if 512 % (64 * int(twice)) == 0:
        assert predict_answer(capsys, _7B, *base, "--mbs", twice)["verdict"] == "does not fit"
