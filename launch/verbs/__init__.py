"""The verbs, one module each: ``add_arguments`` says what it takes, ``run`` answers with a code.

What is slow to import is imported in ``run``, so that help and short answers stay quick.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .arguments import (
        ANSWERS,
        FILE_NAMES,
        ExitCode,
        VerbParser,
        declare,
        file_schema,
        near,
        remedy,
        untaken_option_message,
    )
    from .run_arguments import with_directory_placeholder

__getattr__ = lazy_getattr(__name__)
