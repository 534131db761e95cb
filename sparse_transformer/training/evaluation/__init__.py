"""Bits per dim of networks, and samples that they draw."""
