"""Compiling an experiment for absent devices.

The compilers for GPUs and TPUs come in separate environments, which `make
targets` makes. `hardware` knows the devices; `compilers` runs the `worker` in
such an environment; `hlo` and `kernels` read the compiled program; `rendering`
prints a report on it.
"""
