"""What runs: model shape, parallelism, ranks, operators and collectives of a layout, memory."""
