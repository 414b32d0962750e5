"""Samples of a step, and what happens between steps."""

from __future__ import annotations

from dataclasses import dataclass

from .model_shape import at_least_one, at_most


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples per forward pass of one rank, and per step of all."""

    micro_batch_size: int
    """Samples of one forward pass."""
    global_batch_size: int
    """Samples of one step, over all replicas."""

    def __post_init__(self) -> None:
        at_least_one("micro_batch_size", self.micro_batch_size)
        at_least_one("global_batch_size", self.global_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """How long the run is and what happens between steps; 0 means never or unknown."""

    train_iters: int = 0
    eval_interval: int = 0
    eval_iters: int = 0
    save_interval: int = 0
    rampup_batch_size: tuple[int, ...] = ()
    """First global batch size, its increment, and samples until it is reached."""
    step_batch_size_schedule: str = ""
    """``TOKENS:SIZE TOKENS:SIZE …`` of core 0.18 and later, in place of the ramp."""
    full_batch_size: int = 0
    """Global batch size behind the ramp; 0 means that of ``RunConfig.batch``."""
    is_saving: bool = False
    """There is a folder to save into: the last step and new batch sizes are saved as well."""
    num_final_evals: int = 0
    """Evaluations after the last step: Megatron's are on the validation and on the test set."""
    exit_interval: int = 0
    """The process ends after a step whose number this divides."""

    def __post_init__(self) -> None:
        for name in ("train_iters", "eval_interval", "eval_iters", "save_interval"):
            at_most(name, getattr(self, name))
        for name in ("full_batch_size", "num_final_evals", "exit_interval"):
            at_most(name, getattr(self, name))
