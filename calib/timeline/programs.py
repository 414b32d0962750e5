"""Program of one pipeline stage: passes, messages it posts, messages it waits for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ..errors import ConfigError


class TaskKind(Enum):
    """Kind of a span of the simulated step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    EXCHANGE = "exchange"
    """A blocking exchange: both ends are blocked until it ends."""
    TRANSFER = "transfer"
    """An asynchronous message: it occupies its link, and blocks only a stage that waits for it."""
    REDUCE = "gradient reduction"
    """The part that no backward pass hides."""
    GATHER = "parameter gather"
    """The part that no forward pass hides."""
    OPTIMIZER = "optimizer"
    HOST = "host"
    """Host time once in a step, after the optimizer."""


class Pass(NamedTuple):
    """One computation of one chunk on one micro-batch."""

    kind: TaskKind
    chunk: int
    microbatch: int


class Message(NamedTuple):
    """Message across the boundary between chunks ``boundary`` and ``boundary + 1``."""

    boundary: int
    microbatch: int
    is_gradient: bool


class Post(NamedTuple):
    """Messages whose sending or receiving end this stage posts, without waiting."""

    messages: tuple[Message, ...]
    is_blocking: bool
    """True if the stage waits for all of them at once. If both ends do, an activation down and a
    gradient up between the same two posts form one exchange."""


class Wait(NamedTuple):
    """Nothing after it starts before these messages have arrived."""

    messages: tuple[Message, ...]


Item = Pass | Post | Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Size of a pipeline, which determines its order of events: 1F1B, interleaved with more than
    one virtual stage."""

    num_stages: int
    num_microbatches: int
    num_virtual_stages: int = 1
    microbatch_group_size: int = 0
    """Micro-batches that a stage runs through one chunk before the next; 0 stands for the number of
    stages."""
    overlaps_p2p: bool = True
    """Messages of the steady phase overlap the passes; only used for interleaved chunks."""
    overlaps_p2p_ends: bool = False
    """Messages of warm-up and cool-down overlap too
    (``--overlap-p2p-communication-warmup-flush``)."""

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_microbatches", "num_virtual_stages"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, not at least 1; raise it")
        if self.num_virtual_stages > 1:
            _check_interleaved(self)

    @property
    def num_chunks(self) -> int:
        """Chunks of the model; chunk c runs on stage c % num_stages."""
        return self.num_stages * self.num_virtual_stages

    @property
    def group_size(self) -> int:
        """Micro-batches that a stage runs through one chunk before the next."""
        return self.microbatch_group_size or self.num_stages


def sender(message: Message, num_stages: int) -> int:
    """Return the sending stage: of an activation the one before the boundary, of a gradient the one
    after.

    >>> sender(Message(3, 0, False), 4), sender(Message(3, 0, True), 4)
    (3, 0)
    """
    return (message.boundary + message.is_gradient) % num_stages


def receiver(message: Message, num_stages: int) -> int:
    """Return the receiving stage.

    >>> receiver(Message(3, 0, False), 4), receiver(Message(3, 0, True), 4)
    (0, 3)
    """
    return (message.boundary + 1 - message.is_gradient) % num_stages


def _check_interleaved(pipeline: Pipeline) -> None:
    """Check the limits of Megatron's own schedule."""
    stages, m, group = pipeline.num_stages, pipeline.num_microbatches, pipeline.group_size
    if stages < (2 if pipeline.overlaps_p2p else 3):
        raise ConfigError(
            f"vp {pipeline.num_virtual_stages} on {stages} stages: interleaving needs 2, and 3 "
            "where point-to-point messages do not overlap; set vp 1"
        )
    if not stages <= group <= m:
        raise ConfigError(
            f"microbatch_group_size is {group}, not from pp {stages} to {m} micro-batches; "
            "choose one between, or set vp 1"
        )
    if 0 < m % group < stages:
        raise ConfigError(
            f"{m} micro-batches in groups of {group} leave {m % group}, fewer than pp {stages}; "
            f"choose a multiple of {group}"
        )
