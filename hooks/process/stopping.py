"""The question of a loop of one's own, which costs nothing where no session runs."""

from __future__ import annotations

import sys

_HOOKS = __name__.partition(".process")[0]


def should_stop() -> bool:
    """For a loop of one's own, after each step: True once all ranks end here, to save and leave.

    The same answer on all ranks; False where ``--calibrate-on-advice=stop`` is not given.
    """
    module = sys.modules.get(f"{_HOOKS}.session.session")
    session = None if module is None else module.running()
    return session is not None and bool(session.should_stop())
