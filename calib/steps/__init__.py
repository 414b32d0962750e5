"""Step models that are calibrated by the step times of a few layouts."""
