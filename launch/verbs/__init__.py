"""Verbs, one module each: ``add_arguments`` declares arguments, ``run`` returns an exit code.

Slow imports are made in ``run``, so that help and short answers stay quick.
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
