"""A calibrated run as a Python object: ``forerun.load(DIR)``.  The verbs ask it too."""
