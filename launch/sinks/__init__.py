"""Where the values of each step go besides files: W&B, TensorBoard, Prometheus, TrainJob, Slurm."""

from typing import TYPE_CHECKING

from ...faces import names_on_demand

if TYPE_CHECKING:
    from .prometheus_sink import prometheus_name
    from .registry import AllSinks
    from .sink import Sink
    from .wandb_sink import has_key

__getattr__ = names_on_demand(__name__)
