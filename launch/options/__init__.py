"""What the user asks for: ``--calibrate-...`` flags, files of arguments, checkpoints' arguments.

In: words and files. Out: ``Settings`` and ``RunConfig``.
"""
