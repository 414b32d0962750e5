"""Recipes to copy: launch scripts and a small Megatron-core pre-training script."""
