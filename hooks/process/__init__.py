"""The process that we are a guest in: host, faults, forks, interpreter, identity, settings, votes.

Standard library and torch alone; nothing of the other rooms of ``hooks``.
"""

from typing import TYPE_CHECKING

from ...faces import names_on_demand

if TYPE_CHECKING:
    from .cores import PAUSE_S, SLICE_S, Pace, step_aside
    from .events import CollectionWatch, in_forked_child
    from .guard import OWN_THREAD, Guard, is_failing
    from .host import (
        Host,
        KnownHost,
        Reference,
        living,
        param_groups,
        reference,
        references,
        update_calls,
    )
    from .host_wandb import (
        FORECAST,
        HOST_TABLES,
        HOST_VALUES,
        CompanionFiles,
        HostWandb,
        Said,
        attach_report,
        define_steps,
        host_run,
        wandb_table,
    )
    from .interpreter import (
        PACKAGES,
        VARIABLE,
        companion_command,
        installed_version,
        is_installed,
        missing,
        needs,
        own_version,
        remedy,
        waiting,
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
    from .looking import (
        attribute,
        class_names,
        classes,
        contents,
        is_a,
        module_name,
        named_tree,
        own_weights,
        tree,
        weights,
    )
    from .node_sight import Sight, see_links, see_node
    from .post_import import when_imported
    from .settings import (
        LOCAL_RANKS,
        LOCAL_SIZES,
        RESTART_WINDOWS,
        CadenceHint,
        CompanionSettings,
        RankInfo,
        Settings,
    )
    from .stand_ins import eager, is_stood_in, lying_at, pass_over_package, places_of, stand_in
    from .stopping import should_stop
    from .votes import LATE, YES, StoreLink, Votes, find_link, values, why_not

__getattr__ = names_on_demand(__name__)
