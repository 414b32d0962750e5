"""Unit constants, and the only place that formats SI numbers for display."""

from __future__ import annotations

import math
from collections.abc import Sequence

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TERA = 1e12
NS_PER_S = 1_000_000_000
HOUR_S = 3600.0
DAY_S = 86400.0


def format_time(time_s: float) -> str:
    """Return seconds as text with a fitting unit.

    >>> format_time(1.8423), format_time(0.00512), format_time(148_320)
    ('1.842 s', '5.12 ms', '41.2 h')
    """
    if not math.isfinite(time_s):
        return "unknown"
    size = abs(time_s)
    if size >= HOUR_S:
        return f"{time_s / HOUR_S:.1f} h"
    if size >= 120:
        return f"{time_s / 60:.1f} min"
    if size >= 0.1 or size == 0:
        return f"{time_s:.3f} s"
    if size >= 1e-4:
        return f"{time_s * 1e3:.2f} ms"
    return f"{time_s * 1e6:.1f} us"


def format_bytes(nbytes: float) -> str:
    """Return bytes as text with a binary unit.

    >>> format_bytes(76_235_669_504), format_bytes(2048)
    ('71.0 GiB', '2.0 KiB')
    """
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes:.0f} B"


def format_frac(frac: float, *, signed: bool = False) -> str:
    """Return a fraction as percent.

    >>> format_frac(0.0103), format_frac(-0.11, signed=True)
    ('1.0 %', '-11.0 %')
    """
    if not math.isfinite(frac):
        return "unknown"
    return f"{frac * 100:+.1f} %" if signed else f"{frac * 100:.1f} %"


INDISTINGUISHABLE = "cannot tell"
"""Text for a change whose interval contains 0."""


def format_change(
    frac: float, low_frac: float, high_frac: float, *, of: str = "per step", digits: int = 0
) -> str:
    """Return a change in percent as "less" or "more", without a sign; its interval in brackets.

    If the interval contains 0, the text is ``INDISTINGUISHABLE`` and the interval.

    >>> format_change(-0.11, -0.15, -0.06), format_change(-0.5, -0.78, 0.02)
    ('11 % less per step (6 to 15)', 'cannot tell (2 % more to 78 % less per step)')
    >>> format_change(0.03, 0.01, 0.05), format_change(-0.012, -0.02, -0.008, digits=1)
    ('3 % more per step (1 to 5)', '1.2 % less per step (0.8 to 2.0)')
    """
    word, other, sign = ("more", "less", 1.0) if frac > 0 else ("less", "more", -1.0)
    low, high = sorted((100 * sign * low_frac, 100 * sign * high_frac))
    if low < 0 < high:
        ends = f"{-low:.{digits}f} % {other} to {high:.{digits}f} % {word} {of}"
        return f"{INDISTINGUISHABLE} ({ends})"
    ends = f"{low:.{digits}f} to {high:.{digits}f}"
    return f"{100 * abs(frac):.{digits}f} % {word} {of} ({ends})"


def format_count(number: float) -> str:
    """Return a large number in three significant digits, with commas.

    >>> format_count(71_234.0), format_count(1_124_478), format_count(0.5)
    ('71,200', '1,120,000', '0.5')
    """
    return f"{number:,.3g}" if abs(number) < 1 else f"{float(f'{number:.3g}'):,.15g}"


_MOST_RANKS = 4


def format_ranks(ranks: Sequence[int]) -> str:
    """Return a short list of ranks: the first four, and the number of the others.

    >>> format_ranks((3,)), format_ranks(range(7))
    ('rank 3', 'ranks 0, 1, 2, 3 and 3 more')
    """
    text = ", ".join(map(str, ranks[:_MOST_RANKS]))
    if len(ranks) > _MOST_RANKS:
        text += f" and {len(ranks) - _MOST_RANKS} more"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
