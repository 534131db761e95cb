"""Compiles an experiment for devices that are absent."""
