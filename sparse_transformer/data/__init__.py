"""Data as sequences of symbols, and batches as a function of (seed, step)."""

from sparse_transformer.data import (
  images as images,  # each module registers its sources
  labelled as labelled,
  listops as listops,
  streams as streams,
  tasks as tasks,
)
from sparse_transformer.data.sources import (
  SOURCES as SOURCES,
  Images as Images,
  Lazy as Lazy,
  Sequences as Sequences,
  Source as Source,
  Stream as Stream,
  batches as batches,
  register as register,
  source as source,
)
from sparse_transformer.data.splits import SPLITS as SPLITS
