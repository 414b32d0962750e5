"""Contents of a layer: dense, experts, latent attention, context parallelism, prediction.

In: a ``RunConfig``. Out: operators and collectives of each block and stage, gradient buckets.
Imports ``workload``.
"""
