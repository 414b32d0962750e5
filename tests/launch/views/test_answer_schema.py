"""Every answer of ``predict`` and ``plan`` for programs is what the published schema says."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
from golden_copies import golden_copy
from json_schema import Mismatch, check

from forerun.launch.cli import ExitCode, main
from forerun.launch.verbs.arguments import ANSWERS

GOLDEN = golden_copy("cpu_dp2")
SCHEMA = json.loads(ANSWERS.read_text())
EXPERTS = "--num-experts 4 --moe-router-topk 2 --ep 2 --moe-ffn-hidden-size 64"
QUESTIONS = (
    "predict",
    "predict --tp 2 --mbs 4 --recompute full",
    "predict --gpus 8 --device H100 --zero 3",
    f"predict {EXPERTS}",
    "plan",
    "plan --top 3 --memory-gib 0.1",
    "plan --gpus 4 --why tp=64",
    "plan --gpus 4 --why pp=2 --keep recompute=none",
    "plan --gpus 2..8 --gbs xGPUS --objective cost --price-per-gpu-hour 2.5",
    "plan --device H100,B200 --gpus 2,8 --seq-length 128 --gpus-per-node 4",
)
Out = pytest.CaptureFixture[str]


def answer(capsys: Out, words: str) -> dict[str, Any]:
    verb, *rest = words.split()
    assert main([verb, str(GOLDEN), "--json", *rest]) == ExitCode.ANSWER
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("words", QUESTIONS)
def test_an_answer_is_what_the_schema_says(words: str, capsys: Out) -> None:
    value = answer(capsys, words)
    check(value, SCHEMA)
    kind = {"predict": "prediction", "plan": "plans_answer" if "plans" in value else "plan_answer"}
    check(value, {**SCHEMA, "anyOf": [{"$ref": f"#/$defs/{kind[words.split()[0]]}"}]})
    if find_spec("jsonschema") is not None:
        import jsonschema  # pyright: ignore[reportMissingImports]

        jsonschema.Draft202012Validator.check_schema(SCHEMA)
        jsonschema.Draft202012Validator(SCHEMA).validate(value)


Change = Callable[[dict[str, Any]], object]
WRONG: dict[str, Change] = {
    "a name is gone": lambda v: v["candidates"][0].pop("step_time_s"),
    "a time is text": lambda v: v["own"].update(step_time_s="0.1 s"),
    "a step takes no time": lambda v: v["own"].update(step_time_s=0),
    "a share is above one": lambda v: v["own"]["source_frac"].update(measured=1.5),
    "a verdict is new": lambda v: v["own"].update(verdict="perhaps"),
    "a name is not described": lambda v: v["own"].update(surprise=1),
    "no options stand beside a candidate": lambda v: v["candidates"][0].update(options=[]),
    "the schema is another": lambda v: v.update(schema=2),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_what_differs_is_found(change: Change, capsys: Out) -> None:
    value = copy.deepcopy(answer(capsys, "plan"))
    change(value)
    with pytest.raises(Mismatch):
        check(value, SCHEMA)


@pytest.mark.parametrize("verb", ["predict", "plan"])
def test_the_schema_is_printed_without_a_directory(verb: str, capsys: Out) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, "--json-schema"])
    assert stop.value.code in (0, None)
    assert json.loads(capsys.readouterr().out) == SCHEMA
