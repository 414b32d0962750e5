"""What runs: model shape, degrees, batch, ranks of groups; operators and collectives by name.

In: degrees and shapes. Out: ``RunConfig``, ``Operator``, ``CollectiveCall``, the ranks of each
group. Imports nothing of ours but errors.
"""
