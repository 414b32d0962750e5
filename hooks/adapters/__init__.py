"""Where host frameworks are met: Megatron-LM training, loops on megatron.core, own loops."""
