"""Checkpoints, which are written completely or not at all, and verified."""
