"""Sparse Transformers (Child et al. 2019) in JAX."""

__version__ = "0.2.0"
