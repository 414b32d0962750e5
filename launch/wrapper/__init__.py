"""``forerun run``: launch wrapper for scheduler limits, stops on advice, and resubmission.

Standard library only.
"""
