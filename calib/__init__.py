"""The pure core, from records to answers.

Nothing here imports torch, megatron or wandb, or reads a clock, the environment or the network;
only ``samples.store`` and ``records.files`` touch files. ARCHITECTURE.md lists the rooms, lowest
first: a room imports from those before it, and a test holds it to that.
"""
