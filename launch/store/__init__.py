"""What lies in the directory of a run: launches, forecasts, steps, whose answers are at the top.

In: the directory, and what a companion has to say. Out: files that are written whole, and what they
say, damaged ones named; a ``CachedFile`` of a question, read back while nothing under it changed.
Standard library only, but for tables of samples.
"""
