"""Compiling an experiment for devices that are not here.

The compilers for GPUs and TPUs come in environments of their own, which `make
targets` makes. `catalogue` knows the devices; `compilers` runs the `worker` in
such an environment; `hlo` and `kernels` read what the compiler has made;
`advice` finds what to change if a program does not fit; `rendering` prints.
"""
