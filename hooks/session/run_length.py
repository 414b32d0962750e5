"""How many steps a run has: the host's word, else the user's."""

from __future__ import annotations

import logging

from ..process.settings import Settings

_log = logging.getLogger(__name__)


class RunLength:
    """Weighs ``--calibrate-total-steps`` against what the host says, which wins."""

    def __init__(self, settings: Settings) -> None:
        self._asked = settings.total_steps or 0
        self._hint = settings.cadence.train_iters or 0
        self._is_silent = settings.rank.rank != 0

    def steps(self, told: int) -> int:
        """Steps of the whole run where the host tells so many (0: it does not); 0: unknown.

        The host's own arguments count as its word.
        Says once, on one rank, that the user's number is not used.
        """
        told = told or self._hint
        if told and self._asked not in (0, told) and not self._is_silent:
            self._is_silent = True
            _log.warning(
                "[forerun] --calibrate-total-steps=%d is ignored: the training loop says that the "
                "run has %d steps; leave the flag out",
                self._asked,
                told,
            )
        return told or self._asked
