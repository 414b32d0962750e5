"""The pure core, one way: records -> sample table -> calibration -> timeline -> plan -> decision.

Nothing here imports torch, megatron or wandb, reads a clock, the environment or the network; only
``samples.store`` touches files.
"""
