"""``python -m forerun.launch.companion``: what a session starts beside training."""

from __future__ import annotations

import sys

from .program import main

sys.exit(main())
