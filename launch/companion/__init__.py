"""The process beside training: it reads records, answers after each window, scores itself.

In: events of the session. Out: files, lines in the log, values for sinks, orders.
"""
