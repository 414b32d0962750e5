"""Regressors without knowledge of training: Gaussian process, forest, trees, robust fits.

In and out: numpy arrays, or an estimate. Imports no other package of this project but errors.
"""
