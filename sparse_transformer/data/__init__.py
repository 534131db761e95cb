"""Data as sequences of symbols, and batches as a function of (seed, step)."""

from sparse_transformer.data import (
  generated as generated,  # each module registers its sources
  images as images,
  labelled as labelled,
  listops as listops,
  streams as streams,
)
from sparse_transformer.data.batches import Lazy as Lazy, batches as batches
from sparse_transformer.data.registered import (
  SOURCES as SOURCES,
  register as register,
  source as source,
)
from sparse_transformer.data.sources import (
  Images as Images,
  Sequences as Sequences,
  Source as Source,
  Stream as Stream,
)
from sparse_transformer.data.splits import SPLITS as SPLITS
