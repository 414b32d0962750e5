"""What verbs cache in the directory of a run, and read back while nothing under it has changed.

In: a question, and the directories that its answer is made from. Out: a ``CachedFile``, which is
read and written whole; ``models`` makes bytes of fitted models, and models of them. Others may use
both, and nothing below them.
"""
