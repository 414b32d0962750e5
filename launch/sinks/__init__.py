"""Where the values of each step go besides files: W&B, TensorBoard, Prometheus, TrainJob, Slurm."""
