"""Workload of a run: model shape, degrees, batch, ranks of groups; operators and collectives.

In: degrees and shapes. Out: ``RunConfig``, ``Operator``, ``CollectiveCall``, the ranks of each
group. Imports no other package of ours but errors.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .argument_fields import Argument, arguments_of, read_fields, switch, written_fields
    from .argument_values import (
        Arguments,
        ArgumentValue,
        QuickEnum,
        Values,
        is_true,
        name_of,
        option_of,
        shown,
        whole,
    )
    from .choices import (
        AXES,
        CHOICES,
        LABELLED_CHOICES,
        NAMED_CHOICES,
        OTHER,
        RECOMPUTE_MODULES,
        WHOLE,
        AxisValue,
        Choice,
        FieldValues,
        axis_value,
        choice,
        is_usually_split,
        layout_label,
        layout_words,
    )
    from .collectives import (
        Collective,
        CollectiveCall,
        CollectiveUse,
        GroupRole,
        OtherPass,
        Placement,
    )
    from .config import (
        TORCHTITAN,
        VOCAB_MULTIPLE,
        Attention,
        Batch,
        Cadence,
        CheckpointForm,
        Fp8Recipe,
        Precision,
        Recompute,
        RunConfig,
        switch_values,
        takes_options,
    )
    from .config_json import Encoded, decode, encode, encode_fields
    from .layout_table import (
        FIELDS,
        Column,
        Ints,
        LayoutTable,
        all_but,
        distinct_rows,
        groups,
    )
    from .model_shape import (
        ATTENTION_SYMBOLS,
        EXPERTS_SYMBOL,
        MLP_SYMBOL,
        MOST,
        AttentionWindow,
        Dispatcher,
        Experts,
        LatentAttention,
        ModelShape,
        Normalization,
        OpaqueLayer,
        PositionEmbedding,
        RankLoad,
        at_least_one,
        at_most,
    )
    from .operators import (
        MODULES_BY_ATTRIBUTE,
        MODULES_BY_CLASS,
        OPAQUE_OPERATORS,
        OPTIMIZER_ELEMENT_NBYTES,
        Operator,
        OperatorCount,
        OperatorKind,
        Phase,
        optimizer_operator,
    )
    from .parallelism import ContextComm, Engine, Parallelism, Sharding
    from .pipeline_layout import (
        PipelineLayout,
        PipelineSplit,
        parse_layout,
        split_layers,
        uneven_layers,
        virtual_stages,
        write_layout,
    )
    from .ranks import group, group_call, num_nodes, position
    from .recording import (
        MESSAGE_NBYTES,
        PACKED_NBYTES,
        SMALL_WORLD,
        SUMMARIES_NBYTES,
        WHOLE_NBYTES,
        RecordingDetail,
        RecordingPlan,
        recording_plan,
    )
    from .routing import (
        RoutingBalance,
        RoutingSource,
        expected_distinct,
        imbalance,
        imbalance_over_layers,
        routed,
        routing_source,
    )
    from .run_options import (
        DeviceChoice,
        Flag,
        Goals,
        OnAdvice,
        Reads,
        RunOptions,
        SinkChoice,
        Switch,
        TraceChoice,
        WandbMode,
        options,
    )

__getattr__ = lazy_getattr(__name__)
