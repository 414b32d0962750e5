"""The space of layouts that a run could have, and the best of them.

``space`` defines the choices, ``cells`` enumerates them as columns, and ``best_layouts`` tries them
in the order of ``rough_times``.
"""
