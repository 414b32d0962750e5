"""What training itself reports, and where: looked for once, nothing is imported or touched."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import Any

_WRITER = "tensorboard.summary.writer.event_file_writer"
_TRANSFORMERS = "transformers.integrations.integration_utils"


def event_folder() -> str:
    """The folder of an event file that this process has open for TensorBoard; empty: none.

    Megatron, the Trainers and loops of users' own all write by torch's ``SummaryWriter``, which is
    a thread of tensorboard's; none of them says where in the same way.
    """
    for thread in threading.enumerate():
        if type(thread).__module__ == _WRITER:
            with suppress(AttributeError, TypeError):  # another release keeps it elsewhere
                writer: Any = thread
                return os.path.dirname(os.path.abspath(_path(writer._record_writer._writer)))
    return ""


def _path(file: Any) -> str:
    name = getattr(file, "filename", None) or file.name
    return os.fsdecode(name)


def reports_to_trainjob() -> bool:
    """True where transformers' Trainer or Kubeflow's own package may report to the TrainJob."""
    if "kubeflow.trainer" in sys.modules:
        return True
    is_off = os.environ.get("DISABLE_KUBEFLOW_INTEGRATION", "").upper() == "TRUE"
    has_callback = hasattr(sys.modules.get(_TRANSFORMERS), "KubeflowCallback")
    return "transformers.trainer" in sys.modules and has_callback and not is_off
