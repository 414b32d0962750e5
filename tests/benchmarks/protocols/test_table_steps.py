"""The package's own step model, as the validation of steps builds it."""

from __future__ import annotations

import numpy as np
import pandas as pd
from step_fixtures import grid, timed

from forerun.benchmarks.protocols.table_steps import TableSteps
from forerun.calib.importers.canonical_tables import read_table
from forerun.calib.records.cluster import StatedNodes


def test_a_machine_that_is_slower_by_a_constant_is_calibrated_to_it() -> None:
    rows = [row for row in grid() if row.num_ranks == 8]
    cold = TableSteps().fit([]).predict(rows)
    assert (cold.low_s < cold.time_s).all() and (cold.time_s < cold.high_s).all()
    slow = timed(rows, 1.3 * cold.time_s)
    warm = TableSteps().fit(slow[::2]).predict(rows)
    error = warm.time_s / [row.measured_s for row in slow] - 1
    # Constants that few rows tell, such as hops and what the host takes, stay near their priors.
    assert np.abs(error).max() < 0.09
    assert np.mean(warm.high_s / warm.low_s) < np.mean(cold.high_s / cold.low_s)


def test_tables_of_operators_are_read() -> None:
    # Products at a tenth of the data sheet's rate: steps have to become slower.
    tokens = 2 ** np.arange(8, 15)
    frame = pd.DataFrame(
        {
            "device": "A100",
            "group": "product",
            "kind": "linear",
            "phase": "forward",
            "shape": [f"{count}x2048x2048" for count in tokens],
            "element_nbytes": 2,
            "time_s": 2.0 * tokens * 2048**2 / 31.2e12,
        }
    )
    backward = frame.assign(phase="backward", time_s=2 * frame["time_s"])
    table = read_table(pd.concat([frame, backward], ignore_index=True), "t")
    rows = grid()[:8]
    without = TableSteps().fit([]).predict(rows).time_s
    slow = TableSteps([table]).fit([]).predict(rows).time_s
    assert (slow > 2 * without).all()


def test_what_is_stated_of_nodes_is_priced() -> None:
    """One card of 10 Gb/s in each node: only steps across nodes become slower."""
    rows = grid()
    stated = StatedNodes(num_cards=1, card_bytes_per_s=1.1e9)
    usual, slow = (TableSteps((), s).fit([]).predict(rows).time_s for s in (None, stated))
    far = np.array([row.num_ranks > row.config.parallelism.ranks_per_node > 0 for row in rows])
    assert far.any() and (slow[far] > usual[far]).all()
    assert slow[~far].tolist() == usual[~far].tolist()
