"""Backends of plans: the reference, CPUs, GPUs, TPUs, and everything else."""
