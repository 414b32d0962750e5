"""A launch as its command states it: the layout, the options as written, the variables in front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..arguments.launchers import split_variables
from ..arguments.megatron_command import split_launcher
from ..arguments.megatron_options import options_of
from ..arguments.taken_options import TRANSFORMER_ENGINE
from ..arguments.variables import variables_of
from ..workload.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedLaunch:
    """What is looked at; nothing is known of what the command does not say."""

    config: RunConfig
    """What runs; ``absent`` is what its program does not take."""
    given: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The program's options as written, with the words behind each; the last of two counts."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Those that the command sets; what a shell or a scheduler exports is not among them."""

    def says(self, *options: str) -> bool:
        """Whether one of the options is there."""
        return any(option in self.given for option in options)

    def text(self, option: str, default: str = "") -> str:
        """The first word behind an option; the default where there is none."""
        words = self.given.get(option, ())
        return words[0] if words else default

    def number(self, option: str) -> int | None:
        """The whole number behind an option; None where it is not given, or is none."""
        word = self.text(option)
        return int(word) if word.removeprefix("-").isdecimal() else None

    def written(self, option: str) -> str:
        """An option with its words, as a user knows it."""
        return " ".join((option, *self.given.get(option, ())))

    @property
    def is_on_gpu(self) -> bool:
        """False where ranks are processes of a CPU."""
        return self.config.device != "cpu"

    @property
    def has_engine(self) -> bool:
        """Whether layers are Transformer Engine's, as they are by default on a GPU."""
        is_there = TRANSFORMER_ENGINE not in self.config.absent
        return self.is_on_gpu and is_there and self.text("--transformer-impl") != "local"


def stated_launch(
    words: Sequence[str], config: RunConfig, variables: Mapping[str, str] | None = None
) -> StatedLaunch:
    """The launch of a command line, with or without a launcher, whose layout is known.

    ``variables`` are known beside those that the words set.
    """
    found, rest = split_variables(words)
    launcher, arguments = split_launcher(rest)
    return StatedLaunch(
        config=config,
        given={option: tuple(words) for option, words in options_of(arguments) if option},
        variables={**(variables or {}), **found, **variables_of(launcher)},
    )
