"""From estimates to a step: schedules, simulation of many layouts at once, breakdown, spans.

In: times of blocks and transfers. Out: step time, bubbles, and exposed transfers.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .block_times import BlockTimes
    from .compiled import Compiled, compile_blocks, compile_layouts, pipeline_of
    from .evaluation import GroupTimes, Run, evaluate, simulate_each, simulate_long, step_times
    from .graph import PipelineCosts, event_graph, pipeline_costs
    from .items import (
        PASS_PARTS,
        Floats,
        Ints,
        Item,
        MeasuredSpan,
        Part,
        SparseRows,
        family,
        item_name,
        measured_spans,
        part_of,
    )
    from .overlap import is_shard
    from .programs import Pipeline, TaskKind
    from .schedules import schedule_table
    from .simulation import Simulation, Span, bulk_program, simulate, spans
    from .terms import PART_TEXTS, TERM_TEXTS, Term, term_of, term_of_role, term_times

__getattr__ = lazy_getattr(__name__)
