"""What a user copies: launch scripts and the small Megatron-core pre-training script."""
