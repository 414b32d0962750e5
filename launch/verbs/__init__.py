"""Verbs, one module each: ``add_arguments`` declares arguments, ``run`` returns an exit code.

Slow imports are made in ``run``, so that help and short answers stay quick.
"""
