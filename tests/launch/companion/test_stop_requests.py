"""A wrapper's request to save and stop: followed once, and by the launch that it is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.launch.companion._companion_loop import STOP_REQUEST, StopRequests
from forerun.launch.store.place import Place


def request(folder: Path, **values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    value = {"schema": 1, "unix_s": 1.0, "reason": "SIGUSR1", "rule": "request", **values}
    (folder / STOP_REQUEST).write_text(json.dumps(value))


def test_a_request_for_this_launch_is_passed_on_once(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = []
    place = Place(directory=tmp_path, launch_id="ours", run_id="r")
    requests = StopRequests(place, given.append)
    requests.look()
    assert given == []
    request(place.path, launch_id="ours")
    requests.look()
    requests.look()
    assert given == [{"order": "stop", "rule": "request", "reason": "SIGUSR1"}]


def test_a_request_to_an_earlier_launch_of_that_name_is_ignored(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = []
    place = Place(directory=tmp_path, launch_id="ours", run_id="r")
    request(place.path, launch_id="ours", unix_s=5.0)
    StopRequests(place, given.append, since_unix_s=6.0).look()
    assert given == []
    StopRequests(place, given.append, since_unix_s=5.0).look()
    assert len(given) == 1


@pytest.mark.parametrize(
    ("folder", "values"),
    [
        ("", {"launch_id": "ours"}),
        ("", {}),
        ("runs/other", {"launch_id": "other"}),
        ("runs/ours", {}),
        ("runs/ours", {"launch_id": "other"}),
        ("runs/ours", {"launch_id": ["ours"]}),
    ],
)
def test_any_other_request_is_ignored(
    tmp_path: Path, folder: str, values: dict[str, object]
) -> None:
    given: list[dict[str, Any]] = []
    request(tmp_path / folder, **values)
    place = Place(directory=tmp_path, launch_id="ours", run_id="r")
    StopRequests(place, given.append).look()
    assert given == []
