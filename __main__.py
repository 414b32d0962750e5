"""Command line as ``python -m forerun``, so that ``torchrun ... -m forerun probe`` works."""

import sys

# ``-m`` puts the working directory first, whose files may be named like modules.
if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    del sys.path[0]

from .launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
