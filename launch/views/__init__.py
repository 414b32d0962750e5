"""Presentation of answers: tables, charts, sentences and lines, and their renderers.

In: an ``Answer``, a plan, a difference. Out: text, ``report.html``, JSON, rows of sinks.
A new value is a column of one table here; a new output is another renderer of the same parts.
"""
