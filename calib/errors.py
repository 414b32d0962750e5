"""Errors shown to users; each message has a value, a rule and a remedy."""

from __future__ import annotations

import errno
from itertools import pairwise


class ForerunError(Exception):
    """Base of all errors that Forerun raises."""


class ConfigError(ForerunError, ValueError):
    """Invalid configuration or flag given by the user."""


class UnreadError(ConfigError):
    """Description of a run that lacks what may be in its words that were not read."""


class RecordError(ForerunError):
    """Damaged, empty or foreign record file, or one of another schema."""


class CalibrationError(ForerunError):
    """Too few samples, or none of a required kind."""


def check_ascending(what: str, *values: float | None) -> None:
    """Raise ``CalibrationError`` if an answer's values do not ascend, apart from rounding: a limit,
    the low end of an interval, its value, its high end.  None and NaN are unknown, and skipped."""
    known = [value for value in values if value is not None and value == value]
    if any(one - other > 1e-9 * (abs(one) + abs(other)) for one, other in pairwise(known)):
        chain = " <= ".join(f"{value:g}" for value in known)
        remedy = "record more steps (--calibrate-steps), or longer ones"
        raise CalibrationError(f"{what}: {chain} is impossible; {remedy}")


_OTHER_DIR = "choose another --calibrate-dir"
IN_THE_WAY = (errno.EISDIR, errno.EEXIST, errno.ENOTDIR, errno.ELOOP, errno.ENOTEMPTY)
"""Codes of errors in the place of one file, which say nothing of others."""
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), f"free space or {_OTHER_DIR}"),
    **dict.fromkeys(IN_THE_WAY, f"remove it or {_OTHER_DIR}"),
    errno.ENOTDIR: f"a file is where a folder of this path belongs: remove it or {_OTHER_DIR}",
    **dict.fromkeys((errno.EACCES, errno.EPERM), f"permit writing there or {_OTHER_DIR}"),
    errno.EFBIG: "raise the limit of file size (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def unwritable(path: object, err: OSError) -> str:
    """Return that a file of a run cannot be written, why, and what helps."""
    reason, remedy = err.strerror or err, _REMEDIES.get(err.errno or 0, _OTHER_DIR)
    return f"cannot write {path} ({reason}); {remedy}"
