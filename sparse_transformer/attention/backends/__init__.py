"""The backends: the reference, plain XLA, and kernels for GPUs and TPUs."""
