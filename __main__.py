"""Command line as ``python -m forerun``, so that ``torchrun ... -m forerun probe`` works."""

import sys

from .launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
