"""Run a command in a shell and draw our lines of its output as they came, for the README.

python docs/pictures/record.py --out docs/pictures/terminal.svg --keep '[forerun]' -- COMMAND
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from terminal import TimedLine, terminal_svg

LONGEST_S = 2.5
"""Upper limit of the seconds between two lines of the picture."""


def main() -> int:
    """Record and draw; return the exit code of the command."""
    parser = argparse.ArgumentParser(description="A terminal's lines as a picture.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", default="", help="lines that hold this text; else all")
    parser.add_argument("--shown", help="the command as the picture shows it")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    lines = [TimedLine(at_s=0.0, text=f"$ {args.shown or ' '.join(args.command)}", is_typed=True)]
    begin_s = last_s = time.monotonic()
    with subprocess.Popen(
        args.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    ) as running:
        for text in running.stdout or ():
            sys.stdout.write(text)
            if args.keep in text:
                now_s = time.monotonic()
                gap_s = max(0.25, min(LONGEST_S, now_s - last_s))
                lines.append(TimedLine(at_s=lines[-1].at_s + gap_s, text=text.rstrip()))
                last_s = now_s
    title = f"{lines[0].text}: {len(lines) - 1} lines in {last_s - begin_s:.0f} s"
    args.out.write_text(terminal_svg(lines, title=title), encoding="utf-8")
    return running.returncode


if __name__ == "__main__":
    raise SystemExit(main())
