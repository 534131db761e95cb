"""Sparse attention: one contract, several executors, a plain reference."""

from sparse_transformer.attention.dispatch import attend as attend
