"""Evaluation: bits per dim of networks, and samples drawn from them."""
