"""Trained runs, and their bits per dim."""
