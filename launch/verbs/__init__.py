"""The verbs, one module each: ``add_arguments`` says what it takes, ``run`` answers with a code.

What is slow to import is imported in ``run``, so that help and short answers stay quick.
"""
