"""``python -m forerun.companion``: the process that a session starts alongside training."""

from __future__ import annotations

import sys

from .launch.companion.program import main

if __name__ == "__main__":
    sys.exit(main())
