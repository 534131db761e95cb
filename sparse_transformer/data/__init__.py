"""Data as sequences of symbols, and batches as a function of (seed, step)."""

from sparse_transformer.data import (
  images as images,  # each module registers its sources
  streams as streams,
)
from sparse_transformer.data.batching import batches as batches
from sparse_transformer.data.lazy import Lazy as Lazy
from sparse_transformer.data.registry import (
  SOURCES as SOURCES,
  register as register,
  source as source,
)
from sparse_transformer.data.sources import (
  SPLITS as SPLITS,
  Images as Images,
  Source as Source,
  Stream as Stream,
)
