"""What a run says now: ``forerun status`` and ``forerun watch``, of files alone.

Standard library only.
"""
