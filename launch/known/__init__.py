"""Knowledge of a machine: runs of a directory, imported tables, and the fitted step model.

In: directories. Out: a ``Machine``, whose step model every verb uses.
"""
