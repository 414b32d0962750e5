"""One session per process: when to hook, record, probe and trace, and when to take all off.

In: calls of an adapter. Out: records, and events to the companion. Imports all rooms but
``adapters``.
"""
