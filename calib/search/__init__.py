"""The space of layouts that a run could have, and the best of them, proven.

``space`` says what may vary, ``cells`` lays it out as columns, ``least_time`` and ``least_memory``
say in bulk how fast and how large each can be at best, ``best_first`` evaluates what can still win.
"""
