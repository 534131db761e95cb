"""Sparse Transformers (Child et al. 2019) in JAX."""
