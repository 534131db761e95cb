"""Compiling an experiment for absent devices."""
