"""The host process: faults, forks, interpreter, launch identity, settings and votes.

Uses the standard library and torch alone, and no other package of ``hooks``.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .events import CollectionWatch, in_forked_child
    from .free_memory import LEAST_NBYTES, free_nbytes, make_first_to_go
    from .guard import THREAD_NAME_PREFIX, Guard, is_failing
    from .host import (
        Host,
        Reference,
        WeakHost,
        live_objects,
        reference,
        references,
        update_calls,
        updated_by,
    )
    from .host_wandb import (
        FORECAST,
        HOST_TABLES,
        HOST_VALUES,
        CompanionFiles,
        CompanionOutput,
        HostWandb,
        attach_report,
        define_steps,
        host_run,
        wandb_table,
    )
    from .inspection import (
        attribute,
        class_names,
        classes,
        contents,
        direct_weights,
        forked_rng,
        is_a,
        is_tensor,
        local_variable,
        module_name,
        named_tree,
        tree,
        weights,
    )
    from .interpreter import (
        PACKAGES,
        VARIABLE,
        companion_command,
        install_command,
        install_origin,
        install_source,
        installed_version,
        is_installed,
        missing_packages,
        missing_packages_message,
        no_live_answers_message,
        running_version,
    )
    from .launch_identity import (
        LAUNCH_ID,
        RANKS_PER_S,
        LaunchIdentity,
        boot_id,
        is_launch_id,
        is_stopped,
        launch_folder,
        new_launch_id,
        process_start,
        safe_launch_id,
    )
    from .launch_note import LaunchNote, is_module
    from .node_topology import NodeTopology, detect_node
    from .pacing import PAUSE_S, SLICE_S, Pacer
    from .post_import import when_imported
    from .ranks import SIZES, current_rank, rank_in_training, run_id
    from .settings import (
        RESTART_WINDOWS,
        CadenceHint,
        CompanionSettings,
        RankInfo,
        Settings,
        environ_number,
    )
    from .stand_ins import (
        StandIns,
        eager,
        function_at,
        is_stood_in,
        pass_over_package,
        places_of,
        stand_in,
    )
    from .stopping import should_stop
    from .votes import LATE, YES, StoreLink, Votes, find_link, read_values, refusal_reason

__getattr__ = lazy_getattr(__name__)
