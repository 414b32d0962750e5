"""Workload of a run: model shape, degrees, batch, ranks of groups; operators and collectives.

In: degrees and shapes. Out: ``RunConfig``, ``Operator``, ``CollectiveCall``, the ranks of each
group. Imports no other package of ours but errors.
"""
