"""A calibrated run as a Python object, ``forerun.load(DIR)``, which the verbs use too."""
