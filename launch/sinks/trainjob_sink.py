"""TrainJob sink: progress in the status of this Kubeflow TrainJob.

Kubeflow Trainer (2.2 and later, with its feature gate) gives every pod a server's URL, a
certificate and a token file; each post there replaces the previous status (its proposal 2779).
"""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...calib.plain_json import parse_json
from ...calib.records.iso_times import iso_time
from ...calib.records.run_values import PREFIX, TIME
from ...calib.workload.run_options import AutoSwitch
from ...hooks.process.settings import CompanionSettings
from .sink import LatestValues, Sink

VARIABLE = "KUBEFLOW_TRAINER_SERVER_"
EVERY_S = 5.0
"""Minimum interval that Kubeflow asks of clients, seconds."""
_TIMEOUT_S = 5.0
_MOST_CHARACTERS = 64
_MOST_METRICS = 256
_MOST_SECONDS = 2**31 - 1
"""Bounds of Kubeflow's schema."""
_OK = 200
_ANSWER_NBYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Status server; certificate and token are files that may be replaced during the run."""

    url: str
    ca_cert: Path
    token: Path


class TrainJob(LatestValues):
    """Posts all values each time, since a post replaces the previous one."""

    def __init__(self, server: Server) -> None:
        super().__init__(
            f"status by {urlsplit(server.url).hostname}",
            lambda values: post(server, status(values)),
            every_s=EVERY_S,
            name="trainjob",
        )


def open_trainjob(companion_settings: CompanionSettings) -> Sink:
    """Return the sink of the job that the variables name; an inactive one if training reports
    its own status."""
    wanted = companion_settings.settings.trainjob
    server = server_of(os.environ)
    if wanted is AutoSwitch.OFF or (server is None and wanted is AutoSwitch.AUTO):
        return Sink("")
    if server is None:
        return Sink(f"off (no {VARIABLE}URL, _CA_CERT and _TOKEN here)")
    if companion_settings.has_host_trainjob and wanted is AutoSwitch.AUTO:
        return Sink("off (training reports there itself; --calibrate-trainjob=on takes its place)")
    if urlsplit(server.url).scheme != "https":
        return Sink(f"off ({VARIABLE}URL is not https: the token is not sent)")
    return TrainJob(server)


def server_of(environ: Mapping[str, str]) -> Server | None:
    """Return the server that the variables name; None if one is missing."""
    url, ca_cert, token = (environ.get(VARIABLE + end) for end in ("URL", "CA_CERT", "TOKEN"))
    if not (url and ca_cert and token):
        return None
    return Server(url=url, ca_cert=Path(ca_cert), token=Path(token))


def status(values: Mapping[str, float]) -> dict[str, Any]:
    """Return the body of a post: percent and seconds are whole numbers, metric values are text.

    >>> status({"progress_frac": 0.429, "eta_h": 0.5, "unix_s": 0.0})["trainerStatus"][
    ...     "estimatedRemainingSeconds"
    ... ]
    1800
    """
    body: dict[str, Any] = {}
    if "progress_frac" in values:
        body["progressPercentage"] = int(100 * values["progress_frac"])
    if "eta_h" in values:
        seconds = round(values["eta_h"] * 3600)
        body["estimatedRemainingSeconds"] = min(max(0, seconds), _MOST_SECONDS)
    body["metrics"] = [
        {"name": (PREFIX + name)[:_MOST_CHARACTERS], "value": repr(value)}
        for name, value in values.items()
    ][:_MOST_METRICS]
    body["lastUpdatedTime"] = iso_time(values.get(TIME, time.time()))
    return {"trainerStatus": body}


def post(server: Server, body: Mapping[str, Any]) -> None:
    """Post once, with token and certificate read anew.

    Proxies and redirects are not followed, so that the token goes only to the named server.  Raises
    ``OSError``, ``ValueError`` or ``HTTPException``.
    """
    where = urlsplit(server.url)
    token = server.token.read_text(encoding="utf-8").strip()
    context = ssl.create_default_context(cafile=str(server.ca_cert))
    link = HTTPSConnection(where.hostname or "", where.port, timeout=_TIMEOUT_S, context=context)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    target = where.path + (f"?{where.query}" if where.query else "")
    try:
        link.request("POST", target, json.dumps(body), headers)
        answer = link.getresponse()
        data = answer.read(_ANSWER_NBYTES)
    finally:
        link.close()
    if answer.status != _OK:
        raise OSError(f"status {answer.status} {answer.reason}{_reason(data)}")


def _reason(data: bytes) -> str:
    with suppress(ValueError):
        value = parse_json(data)
        message = value.get("message") if isinstance(value, dict) else None
        return f": {message[:200]}" if isinstance(message, str) else ""
    return ""
