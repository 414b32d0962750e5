"""A plan that was kept is the plan itself, and searched anew where anything under it differs."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from forerun.calib.advice import plan as plans
from forerun.calib.answers import plain_models
from forerun.calib.search.found import Effort
from forerun.launch.known import kept_files, kept_plans
from forerun.launch.known.kept_plans import plan_on
from forerun.launch.opened.loading import load
from forerun.launch.opened.run import Run

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run whose fit is kept."""
    home = tmp_path_factory.mktemp("recorded") / "run"
    shutil.copytree(GOLDEN / "records", home / "records")
    load(home).machine()
    return home


@pytest.fixture
def home(recorded: Path) -> Iterator[Path]:
    """The same with no plan kept."""
    yield recorded
    for path in recorded.glob("planned-*.json"):
        path.unlink()


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by each search that is made."""
    found: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> plans.Plan:
        found.append(kwargs["num_ranks"])
        return plans.plan(*args, **kwargs)

    monkeypatch.setattr(kept_plans, "plan", counted)
    return found


def text_of(run: Run, **asked: Any) -> str:
    value = run.plan(**asked).to_json()
    return json.dumps({name: held for name, held in value.items() if name != "made_unix_s"})


@pytest.mark.parametrize("asked", [{}, {"gpus": 8}, {"memory_gib": 0.5}, {"keep": {"tp": 2}}])
def test_a_kept_plan_is_the_plan_that_is_searched(
    home: Path, searched: list[int], asked: dict[str, Any]
) -> None:
    fresh, kept = load(home).plan(**asked), load(home).plan(**asked)
    assert len(searched) == 1
    assert kept.chosen.plan == fresh.chosen.plan
    assert json.dumps(kept.to_json()) == json.dumps(fresh.to_json())
    assert repr(kept) == repr(fresh)


def test_plan_and_explain_ask_the_same(home: Path, searched: list[int]) -> None:
    first = load(home).plan().candidates[0]
    again = load(home).explain(1, "running")
    assert len(searched) == 1
    assert again.found.one.estimate.config == first.config
    assert again.to_json() == load(home).explain(first, "running").to_json()


@pytest.mark.parametrize(
    "asked",
    [
        {"gpus": 4},
        {"memory_gib": 0.25},
        {"keep": {"tp": 1}},
        {"global_batch_size": 32},
        {"seq_length": 32},
        {"device": "H100"},
        {"top": 40},
    ],
)
def test_another_question_is_searched_for(
    home: Path, searched: list[int], asked: dict[str, Any]
) -> None:
    load(home).plan()
    load(home).plan(**asked)
    assert len(searched) == 2
    load(home).plan()
    load(home).plan(**asked)
    assert len(searched) == 2


@pytest.mark.slow
def test_a_row_more_is_another_fit_and_another_search(
    home: Path, searched: list[int], tmp_path: Path
) -> None:
    grown = tmp_path / "run"
    load(home).plan()
    shutil.copytree(home, grown)
    load(grown).plan()
    another_row(grown)
    load(grown).plan()
    assert len(searched) == 3


@pytest.mark.slow
def test_rows_that_came_after_the_fit_are_no_part_of_what_is_kept(
    home: Path, searched: list[int], tmp_path: Path
) -> None:
    grown = tmp_path / "run"
    shutil.copytree(home, grown)
    early = load(grown)
    early.machine()
    another_row(grown)
    early.plan()
    assert not list(grown.glob("planned-*.json"))
    load(grown).plan()
    assert len(searched) == 2


def another_row(home: Path) -> None:
    path = next(home.glob("records/*/rank-*.jsonl"))
    with path.open("a", encoding="utf-8") as file:
        file.write(path.read_text(encoding="utf-8").splitlines()[-1] + "\n")


@pytest.mark.slow
def test_other_code_searches_anew(
    home: Path, searched: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = tmp_path / "calib" / "search" / "space.py"
    code.parent.mkdir(parents=True)
    code.write_text("before = 1\n", encoding="utf-8")
    monkeypatch.setattr(kept_files, "__file__", str(tmp_path / "launch" / "known" / "one.py"))
    load(home).plan()
    load(home).plan()
    assert len(searched) == 1
    code.write_text("after = 22\n", encoding="utf-8")
    load(home).plan()
    assert len(searched) == 2


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"time_s", b"time_x", 1))


def no_text(path: Path) -> None:
    path.write_bytes(b"\x80\x04" + bytes(range(256)))


def of_everyone(path: Path) -> None:
    path.chmod(0o666)


def sealed(path: Path, value: object) -> None:
    """Another body under the head of the file, with the digest that fits it."""
    body = json.dumps(value).encode()
    key = path.read_bytes().split(b"\n", 1)[0]
    path.write_bytes(b"\n".join([key, hashlib.sha256(body).hexdigest().encode(), body]))


def no_plan(path: Path) -> None:
    sealed(path, plain_models.plain(Effort().top))


def no_class_of_ours(path: Path) -> None:
    entry = {"class": "os:system", "fields": {"command": "true"}}
    sealed(path, {"objects": [entry], "value": {"object": 0}})


def no_json(path: Path) -> None:
    sealed(path, ["plan"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", [torn, flipped, no_text, of_everyone, no_plan, no_class_of_ours, no_json]
)
def test_what_is_damaged_or_foreign_is_passed_over(
    home: Path, searched: list[int], damage: Callable[[Path], None]
) -> None:
    first = text_of(load(home))
    (path,) = home.glob("planned-*.json")
    assert path.stat().st_mode & 0o077 == 0
    damage(path)
    assert text_of(load(home)) == first
    assert len(searched) == 2


def test_a_search_that_was_stopped_is_not_kept(home: Path, searched: list[int]) -> None:
    @contextmanager
    def cut_short(top: int) -> Iterator[Effort]:
        asked = count()
        yield Effort(top=top, is_stopped=lambda: next(asked) > 0)

    load(home, searching=cut_short).plan()
    assert not list(home.glob("planned-*.json"))
    load(home).plan()
    assert len(searched) == 2


def test_a_machine_without_a_directory_keeps_nothing(home: Path, searched: list[int]) -> None:
    machine = replace(load(home).machine(), kept=None)
    for _ in range(2):
        plan_on(machine, machine.own, 2, effort=Effort())
    assert len(searched) == 2
    assert not list(home.glob("planned-*.json"))
