"""One session per process: schedules hooks, recording, probes and traces, and removes them all.

In: calls of an adapter. Out: records, and events to the companion. Imports all packages of
``hooks`` except ``adapters``.
"""
