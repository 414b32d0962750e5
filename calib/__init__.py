"""The pure core, from records to answers.

Nothing here imports torch, megatron or wandb, or reads a clock, the environment or the network;
only ``samples.store`` and ``records.files`` touch files. ARCHITECTURE.md lists the folders,
lowest layer first: each imports only from those before it, which a test enforces.
"""
