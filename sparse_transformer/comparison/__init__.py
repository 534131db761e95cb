"""Runs that differ in one setting, trained to the same budget."""
