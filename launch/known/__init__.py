"""What is known of a machine: runs of a directory, imported tables, its fit.

In: directories. Out: a ``Machine``, whose step model every verb asks.
"""
