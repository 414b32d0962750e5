"""Answers for people and programs: console, report.html, JSON, from one list of tables.

In: an ``Answer``. Out: text and files.
"""
