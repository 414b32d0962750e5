"""Conversion between ``RunConfig`` and Megatron's arguments or Hugging Face's configuration.

In: argument lists and namespaces. Out: a ``RunConfig``, and the reverse. Imports ``workload`` and
``records``.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .hugging_face import Training, from_hugging_face, from_training, in_its_precision
    from .hugging_face_shape import notes_of_keys
    from .launch_lines import Change, LaunchLine, launch_line
    from .launch_words import EXPANSION, MEETING, Phrase, Word, ranks_on_each
    from .launchers import (
        ASIDE_VARIABLES,
        GPUS_PER_NODE,
        is_of_library,
        ranks_of,
        reason,
        split_front,
        split_variables,
        variables_of,
    )
    from .megatron_args import apply_options, options, resumed_command, rewrite_command
    from .megatron_command import (
        Described,
        config_from_command,
        config_from_mapping,
        program_of,
        ranks_unknown,
        split_launcher,
    )
    from .megatron_namespace import from_namespace
    from .megatron_options import (
        ASIDE,
        LISTS,
        MODELLED,
        NAMES,
        SPELLED,
        UNMODELLED_FACTOR,
        ArgumentTable,
        is_known,
        moves,
    )
    from .megatron_rules import CONNECTIONS, VARIABLES, environment, is_fsdp, refusals
    from .megatron_values import layout_values, model_values
    from .option_words import options_of
    from .passed_on import MASK, masked_arguments, masked_command, masked_text, unmask_arguments
    from .shell_text import BATCH, SHELLS, commands, inline_script, of_options
    from .short_names import LayoutConstraint, expand, split_degrees
    from .taken_options import (
        NEEDS_ENGINE,
        TRANSFORMER_ENGINE,
        absent_options,
        options_in,
        program_name,
        unsupported_options_reason,
    )
    from .torch_stacks import on_stack, with_torch_states
    from .torchtitan_options import titan_options

__getattr__ = lazy_getattr(__name__)
