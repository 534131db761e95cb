"""Comparisons of runs that differ in one setting and have the same budget."""
