"""Agreement among ranks: orders from the companion, proposals, and the link to it.

In: lines of the companion. Out: one decision that is the same on every rank.
"""
