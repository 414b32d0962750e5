"""Sinks of step values besides files: W&B, TensorBoard, Prometheus, TrainJob, Slurm."""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .prometheus_sink import prometheus_name
    from .registry import AllSinks
    from .sink import Sink

__getattr__ = lazy_getattr(__name__)
