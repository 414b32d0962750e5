"""From estimates to a step: schedules, simulation of many layouts at once, breakdown, spans.

In: times of blocks and transfers. Out: step time, bubbles, and exposed transfers.
"""
