"""Layouts of one run as columns: the form in which memory and time of layouts are computed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from .config import Batch, RunConfig
from .parallelism import Parallelism

Ints = NDArray[np.int64]
_T = TypeVar("_T")
_OWN = tuple(one.name for one in fields(RunConfig) if one.name not in ("parallelism", "batch"))
_OF_PARALLELISM = tuple(one.name for one in fields(Parallelism))
_OF_BATCH = tuple(one.name for one in fields(Batch))
FIELDS = (*_OWN, *_OF_PARALLELISM, *_OF_BATCH)
"""Names of all columns: the fields of a ``RunConfig``, with those of its parallelism and batch in
place of these two."""
_PATHS = {
    **{name: name for name in _OWN},
    **{name: f"parallelism.{name}" for name in _OF_PARALLELISM},
    **{name: f"batch.{name}" for name in _OF_BATCH},
}
_LARGE = 2**62
_MOST_FREE = 8
"""Possible keys for each row up to which combinations are counted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column(Generic[_T]):
    """One field of all layouts: its distinct values, and the index among them of each layout."""

    values: tuple[_T, ...]
    codes: Ints

    @staticmethod
    def of_numbers(numbers: Sequence[float] | Ints | NDArray[np.bool_]) -> Column[float]:
        """Return the column of some numbers or flags."""
        values, codes = np.unique(np.asarray(numbers), return_inverse=True)
        return Column(values=tuple(values.tolist()), codes=codes)

    def merged(self) -> Column[_T]:
        """Return the column with one code for equal values, of those that some layout has."""
        used, places = np.unique(self.codes, return_inverse=True)
        numbers: dict[_T, int] = {}
        codes = [numbers.setdefault(self.values[code], len(numbers)) for code in used.tolist()]
        return Column(values=tuple(numbers), codes=np.array(codes, dtype=np.int64)[places])

    def take(self, rows: Ints) -> Column[_T]:
        """Return the column of some layouts, by index."""
        return Column(values=self.values, codes=self.codes[rows])

    def value(self, row: int) -> _T:
        """Return the value of one layout."""
        return self.values[self.codes[row]]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutTable:
    """Layouts that differ in some fields, one a row; a single layout is a table of one row.

    Every quantity of a layout is computed once for each distinct combination of the fields that it
    depends on (``each``).
    """

    base: RunConfig
    """A layout with the values of all fields that do not vary."""
    columns: Mapping[str, Column[Any]]
    """Fields that vary, by their names in ``FIELDS``."""
    num_rows: int

    def __len__(self) -> int:
        return self.num_rows

    @staticmethod
    def of(configs: Sequence[RunConfig] | LayoutTable) -> LayoutTable:
        """Return the table of some layouts, at least one; a table is returned as it is."""
        if isinstance(configs, LayoutTable):
            return configs
        columns = {}
        for name in FIELDS:
            value_of = attrgetter(_PATHS[name])
            first = value_of(configs[0])
            values = [value_of(config) for config in configs]
            if all(value is first or value == first for value in values):
                continue
            columns[name] = Column(values=tuple(values), codes=np.arange(len(configs))).merged()
        return LayoutTable(base=configs[0], columns=columns, num_rows=len(configs))

    def config(self, row: int) -> RunConfig:
        """Return one layout; raises ``ConfigError`` if it cannot run."""
        changes = {name: one.values[one.codes[row]] for name, one in self.columns.items()}
        config = self.base
        if not changes:
            return config
        par = {name: changes.pop(name) for name in _OF_PARALLELISM if name in changes}
        batch = {name: changes.pop(name) for name in _OF_BATCH if name in changes}
        return replace(
            config,
            parallelism=replace(config.parallelism, **par) if par else config.parallelism,
            batch=replace(config.batch, **batch) if batch else config.batch,
            **changes,
        )

    def configs(self) -> Iterator[RunConfig]:
        """Yield every layout."""
        return map(self.config, range(len(self)))

    def take(self, rows: Ints) -> LayoutTable:
        """Return some layouts, by index."""
        columns = {name: column.take(rows) for name, column in self.columns.items()}
        return LayoutTable(base=self.base, columns=columns, num_rows=len(rows))

    def column(self, name: str) -> Column[Hashable]:
        """Return a field of all layouts, whether it varies or not."""
        column = self.columns.get(name)
        if column is not None:
            return column
        value = attrgetter(_PATHS[name])(self.base)
        return Column(values=(value,), codes=np.zeros(len(self), dtype=np.int64))

    def numbers(self, name: str) -> Ints:
        """Return the values of a field of whole numbers or flags, shape (layouts,)."""
        column = self.column(name)
        return np.array(column.values, dtype=np.int64)[column.codes]

    def distinct(
        self, names: Sequence[str], *others: NDArray[np.int64 | np.bool_]
    ) -> tuple[Ints, Ints]:
        """Return the first layout of each distinct combination of these fields and other columns,
        and the index of each layout's combination among them."""
        codes = [self.columns[name].codes for name in names if name in self.columns]
        return distinct_rows([*codes, *others], len(self))

    def each(
        self,
        value_of: Callable[[RunConfig], _T],
        names: Sequence[str],
        *others: NDArray[np.int64 | np.bool_],
    ) -> tuple[list[_T], Ints]:
        """Return ``value_of`` of the first layout of each distinct combination, and the index of
        each layout's value in that list."""
        firsts, places = self.distinct(names, *others)
        return [value_of(self.config(first)) for first in firsts.tolist()], places

    def coded(
        self,
        value_of: Callable[[RunConfig], _T],
        names: Sequence[str],
        *others: NDArray[np.int64 | np.bool_],
    ) -> Column[_T]:
        """Return ``value_of`` each layout as a column, as ``each`` does; equal values share a
        code."""
        values, places = self.each(value_of, names, *others)
        return Column(values=tuple(values), codes=places).merged()

    @cached_property
    def num_microbatches(self) -> Ints:
        """Micro-batches of each layout in a step."""
        samples = self.numbers("micro_batch_size") * self.numbers("dp")
        return self.numbers("global_batch_size") // samples


def all_but(*names: str) -> tuple[str, ...]:
    """Return the names of all columns but these."""
    assert set(names) <= set(FIELDS), set(names) - set(FIELDS)
    return tuple(name for name in FIELDS if name not in names)


def distinct_rows(
    columns: Sequence[NDArray[np.int64 | np.bool_]], num_rows: int
) -> tuple[Ints, Ints]:
    """Return the first row of each distinct combination of columns, and the index of each row's
    combination among them; combinations are in the order of their values."""
    if num_rows <= 1:
        return np.arange(num_rows), np.arange(num_rows)
    joined, span = _joined(columns, num_rows)
    if span > _MOST_FREE * num_rows:
        return np.unique(joined, return_index=True, return_inverse=True)[1:]
    # So few possible keys are counted instead of sorted.
    firsts = np.full(span, num_rows)
    np.minimum.at(firsts, joined, np.arange(num_rows))
    is_present = firsts < num_rows
    return firsts[is_present], (np.cumsum(is_present) - 1)[joined]


def _joined(columns: Sequence[NDArray[np.int64 | np.bool_]], num_rows: int) -> tuple[Ints, int]:
    """Return an integer key for each combination, and a number that all keys are below."""
    joined, span = np.zeros(num_rows, dtype=np.int64), 1
    for column in columns:
        values = np.asarray(column, dtype=np.int64)
        least = int(values.min())
        width = int(values.max()) - least + 1
        if span > _LARGE // width:
            joined = np.unique(joined, return_inverse=True)[1]
            span = len(joined)
        joined = joined * width + (values - least)
        span *= width
    return joined, span


def groups(places: Ints) -> Iterator[Ints]:
    """Yield the rows of each place, in ascending order of places."""
    order = np.argsort(places, kind="stable")
    bounds = np.flatnonzero(np.diff(places[order])) + 1
    yield from (part for part in np.split(order, bounds) if len(part))
