"""Sinks of step values besides files: W&B, TensorBoard, Prometheus, TrainJob, Slurm."""
