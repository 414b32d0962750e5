"""In the training process: recorder, guard, hooks, adapters, live session."""
