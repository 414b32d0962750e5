"""Stop test for a user's own loop, at no cost if no session runs."""

from __future__ import annotations

import sys

_HOOKS = __name__.partition(".process")[0]


def should_stop() -> bool:
    """Return True once all ranks end here; called after each step, before the loop saves and exits.

    The result is the same on all ranks; False without ``--calibrate-on-advice=stop``.
    """
    module = sys.modules.get(f"{_HOOKS}.session.session")
    session = None if module is None else module.running()
    return session is not None and bool(session.should_stop())
