"""The pure core: records -> sample table -> calibration -> operators of a layout -> timeline -> forecast, plan -> decision.

Nothing here imports torch, megatron or wandb, reads a clock, the environment or the network; only
``samples.store`` touches files.
"""
