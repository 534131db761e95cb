"""Data as sequences of symbols, and batches as a function of (seed, step)."""

from sparse_transformer.data import (
  arrangements as arrangements,
  cifar10 as cifar10,  # each module registers its sources
  generated as generated,
  images as images,
  labelled as labelled,
  listops as listops,
  scans as scans,  # registers an arrangement
  streams as streams,
)
from sparse_transformer.data.batches import Lazy as Lazy, batches as batches
from sparse_transformer.data.sources import (
  SOURCES as SOURCES,
  Images as Images,
  Sequences as Sequences,
  Source as Source,
  Stream as Stream,
  count_frames as count_frames,
  register as register,
  source as source,
)
from sparse_transformer.data.splits import SPLITS as SPLITS
