"""The process that we are a guest in: host, faults, forks, interpreter, identity, settings, votes.

Standard library and torch alone; nothing of the other rooms of ``hooks``.
"""
