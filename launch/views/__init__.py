"""What is shown of an answer: tables, charts, sentences and lines, and what renders them.

In: an ``Answer``, a plan, a difference. Out: text, ``report.html``, Markdown, JSON, rows of sinks.
A new value is a column of one table here; a new output is one more renderer of the same parts.
"""
