"""The verbs: one file each, from arguments to an exit code."""
