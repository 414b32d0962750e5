"""What passes, and the ends of a step, are made of: operators and transfers of every stage.

Knows the timeline of a layout; the step model scales it, and the trace draws it.
"""
