"""User requests: ``--calibrate-...`` flags, files of arguments.

In: words and files. Out: ``Settings`` and ``RunConfig``.
"""
