"""Companion process of training: reads records, answers after each window, scores its forecasts.

In: events of the session, or a training log. Out: files, log lines, values for sinks, orders.
"""
