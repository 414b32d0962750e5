"""``python -m forerun.companion``: what a session starts beside training."""

from __future__ import annotations

import sys

from .launch.companion import main

if __name__ == "__main__":
    sys.exit(main())
