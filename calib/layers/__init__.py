"""What a layer consists of: dense, experts, latent attention, context parallelism, prediction.

In: a ``RunConfig``. Out: operators and collectives of each block and stage, buckets of gradients.
Imports ``workload``.
"""
