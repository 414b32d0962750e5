"""All rules of the lint that hold of the words alone."""

from __future__ import annotations

from . import (
    environment_rules,
    host_rules,
    kernel_rules,
    overlap_rules,
    precision_rules,
    size_rules,
)

RULES = (
    *precision_rules.RULES,
    *overlap_rules.RULES,
    *kernel_rules.RULES,
    *size_rules.RULES,
    *host_rules.RULES,
    *environment_rules.RULES,
)
