"""Compiling an experiment for absent devices.

`hardware` knows the devices; `compilers` runs the `worker` in the environment
of a compiler; `hlo` reads the compiled program; `rendering` prints a report on
it.
"""
