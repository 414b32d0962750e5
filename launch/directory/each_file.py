"""Several files that are written one by one: what becomes of one is nothing to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path


class UnwrittenError(Exception):
    """Some files could not be made or written; all others were."""

    def __init__(self, failures: Iterable[tuple[Path, Exception]]) -> None:
        self.failures = tuple(failures)
        super().__init__(", ".join(f"{path.name}: {err}" for path, err in self.failures))


def write_each(writes: Iterable[tuple[Path, Callable[[], object]]]) -> None:
    """Call what writes each file; raises ``UnwrittenError`` at the end where one failed."""
    failures: list[tuple[Path, Exception]] = []
    for path, write in writes:
        try:
            write()
        except UnwrittenError as err:
            failures += err.failures
        except Exception as err:
            failures.append((path, err))
    if failures:
        raise UnwrittenError(failures)
