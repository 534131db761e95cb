"""Sources of byte sequences, and batches as a pure function of (seed, step)."""

from sparse_transformer.data.sources import (
  SOURCES as SOURCES,
  SPLITS as SPLITS,
  Images as Images,
  Source as Source,
  Stream as Stream,
  batches as batches,
  source as source,
)
