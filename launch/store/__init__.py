"""Files in a run's directory: launches, forecasts, steps, and ownership of the top level.

In: the directory, and the companion's results. Out: files written atomically, and their content,
with damaged ones reported; a ``CachedFile`` of a question, valid while nothing that it depends on
has changed. Standard library only, except for tables of samples.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .cached_file import CachedFile
    from .forecast_log import (
        Logged,
        append_end,
        append_forecast,
        finish_line,
        read_forecasts,
        read_remaining_run,
    )
    from .launch_files import (
        REQUEST_RULE,
        STOP_REQUEST,
        LaunchFiles,
        NewestForecast,
        Stopped,
        launch_id,
    )
    from .model_archive import DAMAGE_ERRORS, pack_model, unpack_model
    from .publishing import (
        BEAT_S,
        FORECAST,
        FORECASTS,
        OWNER,
        STALE_S,
        STATUS,
        ForecastFile,
        Phase,
        Place,
        Publisher,
        StatusFile,
        UnwrittenError,
        forecasts_path,
        is_live,
        place_of,
        status_of,
        this_host,
        typed,
        write_each,
    )
    from .run_folders import (
        SAMPLES,
        command_words,
        finite_number,
        missing_run_message,
        newest_of_run,
        object_of_run,
        paths_of,
        read_bounded,
        read_object,
        top_of,
    )
    from .run_log import (
        MAX_STORED_POINTS,
        STEPS,
        LoggedStep,
        RunLog,
        StepPoint,
        read_steps,
        score_line,
        write_steps,
    )

__getattr__ = lazy_getattr(__name__)
