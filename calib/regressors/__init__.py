"""Regressors that know nothing of training: Gaussian process, forest, trees, robust fits.

In and out: numpy arrays. Imports nothing of ours but errors.
"""
