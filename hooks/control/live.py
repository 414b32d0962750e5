"""Live output of the training process: events to the companion, metrics to W&B.

Training's own loggers are looked up once, without importing or touching anything.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...calib.arguments.passed_on import masked_arguments
from ...calib.records.record_kinds import StepFlag
from ...calib.workload.config_json import encode_fields
from ...calib.workload.run_options import AutoSwitch
from ..process.host import Host
from ..process.host_wandb import CompanionFiles, HostWandb, host_run
from ..process.interpreter import no_live_answers_message
from ..process.launch_identity import LaunchIdentity
from ..process.launch_note import LaunchNote
from ..process.settings import CompanionSettings, Settings, environ_number
from ..recording.window import StepPlan
from .companion_link import CompanionPipe

_log = logging.getLogger(__name__)
_WRITER = "tensorboard.summary.writer.event_file_writer"
_TRANSFORMERS = "transformers.integrations.integration_utils"


class Live:
    """Events from the rank on which the host logs (Megatron: the last), metrics from any W&B
    rank."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pipe: CompanionPipe | None = None
        self._companion_settings: CompanionSettings | None = None
        self._environment: dict[str, str] = {}
        self._identity = LaunchIdentity(settings)
        self._note = LaunchNote(settings)
        self._files = CompanionFiles(settings.directory, self.launch_id)
        self._wandb: HostWandb | None = None
        self._is_after_window = False
        self._has_logged_directory = False

    def start(self, host: Host | None = None) -> None:
        """Open the companion link on the rank that hosts it, and the host's W&B run on any rank.

        The companion itself is started by ``poll``, once the launch has a name.
        """
        has_host_wandb = host_run() is not None
        is_home = self._settings.rank.is_last
        if host is not None and host.is_home is not None:
            is_home = host.is_home
        if has_host_wandb and self._settings.wandb is not AutoSwitch.OFF:
            is_stepped = host is None or host.is_wandb_stepped
            self._wandb = HostWandb(self._files, is_stepped=is_stepped, is_home=is_home)
        has_program = bool(self._settings.companion_command)
        if is_home and has_program and self._pipe is None:
            self._environment = dict(os.environ)
            self._companion_settings = companion_settings(
                self._settings, has_host_wandb=has_host_wandb
            )
            self._pipe = CompanionPipe()
        if (
            is_home
            and not has_program
            and self._settings.is_answered
            and not self._has_logged_directory
        ):
            self._has_logged_directory = True
            _log.warning("[forerun] %s", no_live_answers_message(self._settings.directory))
        self._identity.begin(is_needed=self._pipe is not None or self._wandb is not None)

    def launch_id(self) -> str:
        """Return the name of this launch; empty until it is known."""
        return self._identity.name

    def send_event(self, event: str, **values: Any) -> None:
        """Send an event to the companion, if this rank hosts it."""
        if self._pipe is not None:
            self._pipe.send({"event": event, **values})

    def step(
        self, number: int, plan: StepPlan, duration_ns: int, gap_ns: int, flags: Iterable[StepFlag]
    ) -> None:
        """Report a finished step."""
        time_s, unix_s = (duration_ns + gap_ns) * 1e-9, time.time()
        is_after_window = self._is_after_window and plan.window is None
        self.send_event(
            "step",
            step=number,
            time_s=time_s,
            gap_s=gap_ns * 1e-9,
            is_hooked=plan.is_hooked,
            window=plan.window,
            is_after_window=is_after_window,
            flags=[flag.value for flag in flags],
            unix_s=unix_s,
        )
        self._is_after_window = self._is_after_window or plan.is_last
        if self._wandb is not None:
            if plan.window is not None and not plan.is_hooked and not plan.is_warmup:
                self._wandb.note_bare(time_s)
            self._log(
                lambda wandb: wandb.log(
                    step=number, time_s=time_s, is_after_window=is_after_window, unix_s=unix_s
                )
            )

    def _log(self, act: Callable[[HostWandb], object]) -> None:
        """Log to the host's W&B run until it fails."""
        try:
            if (wandb := self._wandb) is not None:
                act(wandb)
        except Exception as err:  # W&B raises errors of its own, of the network and of its service.
            self._wandb = None
            _log.warning("[forerun] W&B is off: %s; records are written", str(err))

    def orders(self) -> list[dict[str, Any]]:
        """Return the companion's orders since the last call; empty on ranks without a companion."""
        return [] if self._pipe is None else self._pipe.receive()

    def poll(self) -> None:
        """Start the companion once the launch has a name, and log its results to W&B.

        Called from the writer's thread.
        """
        self._identity.poll()
        self._note.poll()
        self._start_companion()
        self._log(HostWandb.poll)

    def settle(self) -> None:
        """Start a companion that is still missing at the end of the process, so that it can
        report."""
        self._identity.settle()
        self._note.poll()
        self._start_companion()

    def leave(self) -> None:
        """Disconnect a forked child: the companion and the W&B run belong to the parent."""
        self._pipe = self._wandb = None

    def close(self) -> None:
        """Wait for the companion to finish, within its timeout."""
        if self._pipe is not None:
            self._pipe.close()
            self._log(lambda wandb: wandb.poll(is_final=True))

    def _start_companion(self) -> None:
        pipe, name, settings = self._pipe, self._identity.name, self._companion_settings
        if pipe is None or settings is None or pipe.is_started or not name:
            return
        value = encode_fields(replace(settings, launch_id=name))
        pipe.start(self._settings.companion_command, self._environment, value)


def companion_settings(settings: Settings, *, has_host_wandb: bool) -> CompanionSettings:
    """Return the companion's settings, except the name of its launch."""
    return CompanionSettings(
        settings=replace(settings, host_argv=masked_arguments(settings.host_argv)),
        started_unix_s=time.time(),
        num_restarts=environ_number(os.environ, ("TORCHELASTIC_RESTART_COUNT",), 0),
        has_host_wandb=has_host_wandb,
        host_tensorboard=event_folder(),
        has_host_trainjob=reports_to_trainjob(),
    )


def event_folder() -> str:
    """Return the folder of this process's open TensorBoard event file; empty if there is none.

    Megatron, the Trainers and users' own loops all write through torch's ``SummaryWriter``, which
    runs a thread of tensorboard; they have no common way to report the folder.
    """
    for thread in threading.enumerate():
        if type(thread).__module__ == _WRITER:
            with suppress(AttributeError, TypeError):  # attributes differ between releases
                writer: Any = thread
                return os.path.dirname(os.path.abspath(_path(writer._record_writer._writer)))
    return ""


def _path(file: Any) -> str:
    name = getattr(file, "filename", None) or file.name
    return os.fsdecode(name)


def reports_to_trainjob() -> bool:
    """True if transformers' Trainer or Kubeflow's own package may report to the TrainJob."""
    if "kubeflow.trainer" in sys.modules:
        return True
    is_off = os.environ.get("DISABLE_KUBEFLOW_INTEGRATION", "").upper() == "TRUE"
    has_callback = hasattr(sys.modules.get(_TRANSFORMERS), "KubeflowCallback")
    return "transformers.trainer" in sys.modules and has_callback and not is_off
