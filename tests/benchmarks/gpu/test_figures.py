"""Figures of RESULTS.md, "On a GPU", computed again from the archives."""

from __future__ import annotations

import re

import pytest

from forerun.benchmarks.gpu.figures import (
    COMPUTED,
    Archives,
    differences,
    is_as_printed,
    printed,
    rows,
    section,
)

ROWS = dict(rows(section()))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return Archives(tmp_path_factory.mktemp("archives"))


def test_no_figure_stands_beside_the_tables():
    assert len(ROWS) == len(list(rows(section())))
    text = "\n".join(line for line in section() if not line.startswith("|"))
    assert not re.findall(r"\d+ ?(?:%|s|ms|us|GiB)(?!\w)", text)


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_computed_today_is_as_printed(data, name):
    assert differences(name, ROWS[name], COMPUTED[name](data)) == []


def test_a_row_that_was_changed_is_noticed():
    figures = "+0.6 % (+0.5 to 0.9), inside"
    values = (0.6, 0.51, 0.9, True)
    assert differences("row", figures, values) == []
    for old, new in (("0.6", "0.7"), ("+0.5", "-0.5"), ("inside", "outside")):
        assert differences("row", figures.replace(old, new), values)
    assert differences("row", figures, values[:-1])


def test_figures_round_as_they_are_printed():
    assert is_as_printed("21,607".replace(",", ""), 21607) and is_as_printed("+2.0", 1.96)
    assert not is_as_printed("+2.0", 1.94) and not is_as_printed("3", -3)
    assert printed("2 us; outside") == ["2", "outside"]
    assert list(rows(["| a | b | bar |", "|---|---|---|", "| one | 5 % | 3 % |"])) == [
        ("one", "5 %")
    ]
