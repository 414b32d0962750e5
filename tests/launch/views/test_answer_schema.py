"""Every stored answer of a verb for programs is what the published schema of the verb says."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
from json_schema import Mismatch, check

from forerun.benchmarks.golden_answers import ANSWERS as ANSWERS_FOLDER
from forerun.benchmarks.golden_answers import QUESTIONS
from forerun.launch.cli import main
from forerun.launch.verbs.arguments import ANSWERS, FOLDER


def stored(name: str) -> Any:
    """The answer that ``benchmarks/golden_answers.py`` holds a verb against."""
    return json.loads((ANSWERS_FOLDER / f"{name}.json").read_text(encoding="utf-8"))["answer"]


SCHEMA = json.loads(ANSWERS.read_text())
DESCRIBED = [
    name
    for name, words in QUESTIONS.items()
    if words[0] not in ("report", "import")
    and not {"--show", "--write"} & {*words}
    and stored(name) is not None
]
Out = pytest.CaptureFixture[str]


def schema_of(verb: str) -> dict[str, Any]:
    """The published schema of a verb's answers."""
    name = {"predict": "answers", "plan": "answers", "doctor": "lint"}.get(verb, verb)
    return json.loads((FOLDER / f"{name}.schema.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_stored_answer_is_what_the_schema_says(name: str) -> None:
    verb, *_ = QUESTIONS[name]
    value, schema = stored(name), schema_of(verb)
    check(value, schema)
    if verb in ("predict", "plan"):
        kind = "prediction" if verb == "predict" else f"plan{'s' * ('plans' in value)}_answer"
        check(value, {**schema, "anyOf": [{"$ref": f"#/$defs/{kind}"}]})
    if find_spec("jsonschema") is not None:
        import jsonschema  # pyright: ignore[reportMissingImports]

        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.Draft202012Validator(schema).validate(value)


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
def test_what_differs_is_found(change: Change) -> None:
    value = stored("cpu_plan")
    change(value)
    with pytest.raises(Mismatch):
        check(value, SCHEMA)


@pytest.mark.parametrize("verb", ["predict", "plan"])
def test_the_schema_is_printed_without_a_directory(verb: str, capsys: Out) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, "--json-schema"])
    assert stop.value.code in (0, None)
    assert json.loads(capsys.readouterr().out) == SCHEMA
