"""Figures of patterns, and of bits by training step and by position."""
