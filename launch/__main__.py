"""``torchrun ... -m forerun.launch script.py ... --calibrate``: the explicit entry point.

It does what the packaging entry point does, even if that is switched off
(``TORCH_DEVICE_BACKEND_AUTOLOAD=0``), and then runs the script as Python would.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

USAGE = "usage: torchrun ... -m forerun.launch (script.py | -m module) [arguments] [--calibrate]"


def main(arguments: Sequence[str]) -> int:
    """Run the script or module that the arguments begin with; return 2 if they name none."""
    is_module = arguments[:1] == ["-m"]
    script_argv = list(arguments[1:] if is_module else arguments)
    if not script_argv or script_argv[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    target = script_argv[0]
    if not is_module and not os.path.exists(target):
        print(f"no script {target}; {USAGE}", file=sys.stderr)
        return 2
    sys.argv[:] = script_argv
    if not is_module:
        sys.path[0] = os.path.dirname(os.path.realpath(target))

    import torch  # noqa: F401  both the hooks and the entry point look for it in sys.modules

    from .autoload import load

    load(is_explicit=True)
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
