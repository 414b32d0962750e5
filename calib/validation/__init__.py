"""How right the models are on a table of measurements: protocols and scores.

In: tables in our own format. Out: errors, coverage, the order of layouts.
"""
