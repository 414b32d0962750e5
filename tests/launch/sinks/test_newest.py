"""Senders in a thread of their own send the newest, not too often, and retry failures."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from status_server import has_openssl, status_server

from forerun.launch.sinks import trainjob_sink
from forerun.launch.sinks.sink import ThrottledSender
from forerun.launch.sinks.trainjob_sink import TrainJob, post, server_of, status


def test_of_many_the_first_and_the_newest_are_sent() -> None:
    sent: list[int] = []
    newest = ThrottledSender(sent.append, every_s=60.0, notify=print, name="test")
    newest.put(0)
    while not sent:
        time.sleep(0.001)
    for value in range(1, 1000):
        newest.put(value)
    newest.close()
    assert sent == [0, 999]


def test_they_are_as_far_apart_as_was_said() -> None:
    moments: list[float] = []
    newest = ThrottledSender(
        lambda _: moments.append(time.monotonic()), every_s=0.2, notify=print, name="test"
    )
    end_s = time.monotonic() + 1.0
    while time.monotonic() < end_s:
        newest.put(1)
        time.sleep(0.001)
    newest.close()
    apart_s = [after - before for before, after in pairwise(moments[:-1])]
    assert apart_s and min(apart_s) >= 0.199


def test_a_failure_is_said_once_and_the_newest_comes_through_later() -> None:
    messages: list[str] = []
    sent: list[int] = []
    tries = threading.Semaphore(0)

    def send(value: int) -> None:
        tries.release()
        if len(messages) < 1 or value < 3:
            raise OSError("no route to host")
        sent.append(value)

    newest = ThrottledSender(send, every_s=0.01, notify=messages.append, name="test")
    for value in (1, 2, 3):
        newest.put(value)
        assert tries.acquire(timeout=30.0)
    while not sent:
        time.sleep(0.001)
    newest.close()
    assert messages == ["no route to host; Forerun tries again"]
    assert sent == [3]


def test_what_hangs_holds_up_neither_steps_nor_the_end() -> None:
    hang = threading.Event()
    newest = ThrottledSender(lambda _: hang.wait(), every_s=0.01, notify=print, name="test")
    begin_s = time.monotonic()
    for value in range(1, 1000):
        newest.put(value)
    newest.close(patience_s=0.1)
    assert time.monotonic() - begin_s < 5.0
    hang.set()


needs_openssl = pytest.mark.skipif(not has_openssl(), reason="no openssl for a certificate")


@needs_openssl
def test_a_token_that_rotates_between_posts_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainjob_sink, "EVERY_S", 0.05)
    messages: list[str] = []
    with status_server(tmp_path) as server:
        target = server_of(server.environ)
        assert target is not None
        sink = TrainJob(target)
        sink.notify = messages.append
        sink.step(1, {"progress_frac": 0.1, "eta_h": 1.0, "unix_s": 0.0})
        server.wait_for(1)
        # The old one is refused before the new one lies there, as where a pod's clock is behind.
        server.tokens = {"second"}
        sink.step(2, {"progress_frac": 0.2})
        server.wait_for(2)
        (tmp_path / "token").write_text("second\n")
        server.wait_for(3)
        sink.step(3, {"progress_frac": 0.3})
        sink.close({})
        tokens = [token for token, _ in server.posts]
        done = [body["trainerStatus"]["progressPercentage"] for body in server.taken]
    assert tokens[0] == "first" and tokens[-1] == "second"
    assert done[-1] == 30 and done == sorted(done)
    assert messages == ["status 403 Forbidden: Forbidden; Forerun tries again"]


@needs_openssl
def test_a_server_of_another_authority_gets_no_token(tmp_path: Path) -> None:
    with status_server(tmp_path) as server:
        target = server_of(server.environ)
        assert target is not None
        (tmp_path / "other").mkdir()
        with status_server(tmp_path / "other") as other:
            (tmp_path / "ca.crt").write_bytes((other.home / "ca.crt").read_bytes())
        with pytest.raises(OSError, match="certificate verify failed"):
            post(target, status({}))
        assert server.posts == []


def test_numbers_stay_within_kubeflows_bounds() -> None:
    values = {"progress_frac": 1.0, "eta_h": 1e9, "unix_s": 0.0, "n" * 90: 1.0}
    result = status({**values, **{f"value{i}": 0.5 for i in range(300)}})["trainerStatus"]
    assert result["progressPercentage"] == 100
    assert result["estimatedRemainingSeconds"] == 2**31 - 1
    assert len(result["metrics"]) == 256
    assert max(len(metric["name"]) for metric in result["metrics"]) == 64
    assert result["lastUpdatedTime"] == "1970-01-01T00:00:00Z"
