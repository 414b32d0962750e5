"""Names of the protocols, and what a table has to hold for each."""

from __future__ import annotations

OPERATOR_PROTOCOLS = {
    "random": "an operator with 23 samples or more",
    "small_to_large": "an operator with 23 samples or more",
    "few_8": "an operator with 13 samples or more",
    "few_24": "an operator with 29 samples or more",
    "leave_tp": "an operator with samples at two tensor-parallel degrees or more",
    "leave_gpu": "products or attention measured on two devices or more",
}
COLLECTIVE_PROTOCOLS = {
    "random": "a collective with five payloads or more on one group shape",
    "small_to_large": "a collective with five payloads or more on one group shape",
    "few_8": "a collective with more than 8 payloads on one group shape",
    "few_24": "a collective with more than 24 payloads on one group shape",
    "leave_span": "one fabric measured on several numbers of nodes or, on one node, of ranks",
}
