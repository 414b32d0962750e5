"""The host process: faults, forks, interpreter, launch identity, settings and votes.

Uses the standard library and torch alone, and no other package of ``hooks``.
"""
