"""Sparse attention: one contract, several executors, a plain reference."""

from sparse_transformer.attention.adapters import (
  as_attention_fn as as_attention_fn,
)
from sparse_transformer.attention.caches import clear_caches as clear_caches
from sparse_transformer.attention.contract import SAVED_NAMES as SAVED_NAMES
from sparse_transformer.attention.decoding import (
  Cache as Cache,
  attend_next as attend_next,
  fill_cache as fill_cache,
  init_cache as init_cache,
)
from sparse_transformer.attention.dispatch import attend as attend
