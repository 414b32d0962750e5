"""Hooks of hooked steps: modules, passes, transfers, timers, and the marks they leave.

In: the host's modules and groups. Out: marks in integer arrays. Imports ``process``.
"""
