"""Records that hooks write, line by line, and traces that PyTorch and NCCL write.

In: lines of JSON. Out: record classes, and runs with damaged lines named. Imports ``workload``.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .cluster import (
        KEYS,
        LINKS,
        NVL72,
        Cluster,
        GpuInterconnect,
        Origin,
        SeenNode,
        StatedNodes,
        joined_clusters,
        stated_nodes,
    )
    from .files import (
        CREATED,
        CREATED_BY,
        MARKUP_COMMENT,
        OPEN,
        PRIVATE,
        Tail,
        append_line,
        is_ours,
        open_owned,
        read_json,
        read_lines,
        read_package_json,
        refuse_foreign,
        replace_by,
        replace_file,
        sealed,
        write_json,
        write_text,
    )
    from .flight import Called, FlightEntry, HostSpan, parse_dump, unhooked_entries, with_durations
    from .iso_times import LONGEST_S, Action, action_text, iso_time, stamped, with_iso_times
    from .kineto_trace import (
        CPU_OP,
        KERNEL,
        MESSAGE_OP,
        RUNTIME,
        SHAPES,
        USER_RANGE,
        Launches,
        Nesting,
        Paced,
        TracedCollective,
        TracedWork,
        TraceEvent,
        accelerator_kind,
        busy_ns,
        collective_named,
        device_work,
        group_named,
        kernel_collective,
        num_products,
        operations_by_thread,
        products_of,
        work_of,
    )
    from .packed import MAX_LINE_NBYTES, Packer, pack
    from .rank_summary import StepSums, summarise
    from .record_kinds import (
        SCHEMA,
        CollectiveRecord,
        CoverageRecord,
        DataLength,
        Header,
        LoopRecord,
        OperatorRecord,
        PhaseRecord,
        RankRecord,
        Record,
        RunRecord,
        StepFlag,
        StepRecord,
        TraceRecord,
        WindowRecord,
        to_dict,
    )
    from .run_records import RankFile, RunRecords, SummaryFile, join_ranks, parse_header
    from .run_values import (
        ITERATION,
        LAUNCH,
        LEVELS,
        MARKER,
        NAME,
        PREFIX,
        RATES,
        RUN_VALUES,
        RUNS,
        SUMMARY_VALUES,
        TIME,
        Launch,
        UnsentValues,
        hours_remaining,
        progress,
    )
    from .step_rows import SkippedRow, StepKind, StepPredictions, StepRow, StepTable, Trait

__getattr__ = lazy_getattr(__name__)
