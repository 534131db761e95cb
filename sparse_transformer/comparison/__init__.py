"""Runs that differ in one setting, trained on the same budget."""
