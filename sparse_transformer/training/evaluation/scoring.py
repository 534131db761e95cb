"""Bits per dim over a split, with every position counted once."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding

from sparse_transformer.progress import progress
from sparse_transformer.training.distributed import processes

# Scored positions of a stream in a block, whose mean counts as one draw for the
# standard error. Losses of text are correlated over thousands of bytes: with an
# order-4 model of Wikipedia, blocks of 128, 1,024, 4,096, 16,384 and 65,536
# bytes give errors in the ratios 1, 1.7, 2.4, 3.4 and 4.3.
BLOCK = 16_384


class Tally:
  """Sums up the bits of windows: images, or parts of a stream.

  The standard error is that of a mean of blocks, as if these were independent.

  Args:
    length: positions in a window, L.
    block: scored positions in a block; None for all of a window, as for images
      and labels.

  Attributes:
    bits_L: the sum over windows of the bits at each position, float64.
    counts_L: how many windows score each position.
    windows: how many windows were added.
  """

  def __init__(self, length: int, block: int | None = None):
    self.bits_L = np.zeros(length)
    self.counts_L = np.zeros(length, np.int64)
    self.windows = 0
    self._hits: int | None = None  # labels that are predicted
    self._block = block or length
    self._open = np.zeros(0)  # bits of the positions of an unfinished block
    # The number of blocks, the sum of their mean bits, and that of the squares:
    # all that the variance needs, however many blocks there are.
    self._moments = np.zeros(3)

  def add(
    self,
    nats_BL: np.ndarray,
    scored_BL: np.ndarray,
    hits_B: np.ndarray | None = None,
  ) -> None:
    """Adds windows, in the order of the split.

    Args:
      nats_BL: the loss at each position.
      scored_BL: whether it counts, bool.
      hits_B: for a classifier, whether the label of each window is predicted.
    """
    if hits_B is not None:
      self._hits = (self._hits or 0) + int(hits_B.sum())

    # The sum of millions of losses would lose digits in float32.
    bits_BL = np.where(scored_BL, np.asarray(nats_BL, np.float64), 0)
    bits_BL = bits_BL / math.log(2)
    self.bits_L += bits_BL.sum(0)
    self.counts_L += scored_BL.sum(0)
    self.windows += len(bits_BL)

    # Blocks go on from window to window, as the positions of a stream do.
    bits = np.concatenate([self._open, bits_BL[scored_BL]])
    end = len(bits) - len(bits) % self._block
    means = bits[:end].reshape(-1, self._block).mean(1)
    self._moments += [len(means), means.sum(), (means**2).sum()]
    self._open = bits[end:]

  @property
  def tokens(self) -> int:
    """How many positions were scored."""
    return int(self.counts_L.sum())

  @property
  def bits_per_dim(self) -> float | None:
    """The mean bits of all scored positions; None if there is none."""
    return float(self.bits_L.sum()) / self.tokens if self.tokens else None

  @property
  def standard_error(self) -> float | None:
    """The standard error of `bits_per_dim`; None for fewer than two blocks.

    The variance of the means of blocks, divided by the number of blocks; an
    unfinished block counts as a fraction of one.
    """
    blocks, means, squares = self._moments
    if blocks < 2:
      return None

    # Rounding may take the variance of equal means below 0.
    variance = max(0, squares - means**2 / blocks) / (blocks - 1)
    return math.sqrt(variance * self._block / self.tokens)

  @property
  def accuracy(self) -> float | None:
    """The share of labels that were predicted; None without labels."""
    return None if self._hits is None else self._hits / self.windows

  @property
  def accuracy_error(self) -> float | None:
    """The standard error of `accuracy`; None for fewer than two labels."""
    if self.accuracy is None or self.windows < 2:
      return None

    # That of a mean of independent trials, each right or wrong.
    variance = self.accuracy * (1 - self.accuracy)
    return math.sqrt(variance / (self.windows - 1))

  def means(self, channels: int | None = None) -> np.ndarray:
    """The mean bits at each position [L], nan where none is scored.

    With `channels`, the means of the positions of each channel [channels].
    """
    groups = -1, channels or len(self.bits_L)
    bits = self.bits_L.reshape(groups).sum(0)
    counts = self.counts_L.reshape(groups).sum(0)
    return np.where(counts, bits / np.maximum(counts, 1), np.nan)


def score(
  losses: Callable[[Any], Any],
  windows: Sequence,
  *,
  batch_size: int,
  sharding: NamedSharding,
  block: int | None = None,
  check_stop: Callable[[], None] = lambda: None,
) -> Tally:
  """Scores windows of a split.

  Args:
    losses: from `step.make_losses`, with the parameters of a network bound.
    windows: pairs (tokens, scored), as the sources of `data` return them; read
      one batch at a time; each process reads its devices' part.
    batch_size: windows of a batch.
    sharding: of the batches.
    block: of the `Tally`.
    check_stop: called before each batch; may raise an exception.
  """
  tally = Tally(len(windows[0][1]), block)
  silent = not processes.is_first()
  with progress("scoring", len(windows), silent=silent) as advance:
    for start in range(0, len(windows), batch_size):
      check_stop()
      # All batches have one size, so that a single program scores them.
      num = min(batch_size, len(windows) - start)
      tokens_BL, scored_BL = _place(windows, start, batch_size, sharding)
      with jax.set_mesh(cast(Mesh, sharding.mesh)):
        result = losses(tokens_BL)

      # Each process adds up the whole batch, without the rows that fill it. A
      # classifier also gives hits.
      batch = process_allgather((scored_BL, result), tiled=True)
      scored_BL, nats_BL, *hits_B = [x[:num] for x in jax.tree.leaves(batch)]
      tally.add(nats_BL, scored_BL, *hits_B)
      advance(num)

  return tally


def _place(windows, start, batch_size, sharding):
  """A batch of windows on devices: (tokens_BL, scored_BL).

  Rows after the last window have zeros, none of which is scored.
  """

  # Both parts of a window are read at once, and each window once.
  @functools.cache
  def read(i):
    if start + i < len(windows):
      return windows[start + i]
    return [np.zeros_like(x) for x in windows[0]]

  def place(part):
    shape = batch_size, len(windows[0][part])
    return processes.place(lambda i: read(i)[part], shape, sharding)

  return place(0), place(1)
