"""Files in a run's directory: folders of launches, forecasts, steps.

In: the directory, and the companion's results. Out: files written atomically, and their content,
with damaged ones reported; a ``CachedFile`` of a question, valid while nothing that it depends on
has changed. Standard library only, except for tables of samples.
"""
