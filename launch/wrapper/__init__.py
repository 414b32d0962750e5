"""``forerun run``: around a launcher, for schedulers' limits, stops on advice, resubmission.

Standard library alone.
"""
