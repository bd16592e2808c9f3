"""Training on Ray Train, on DeepSpeed, or in this process."""
