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

# The number of scored positions of a stream in a block. For the standard error,
# the mean of a block counts as one independent sample. Blocks must be large,
# because losses of text are correlated over thousands of bytes: with an order-4
# model of Wikipedia, blocks of 128, 1,024, 4,096, 16,384 and 65,536 bytes give
# errors in the ratios 1, 1.7, 2.4, 3.4 and 4.3.
BLOCK = 16_384


class Tally:
  """Accumulates the bits of windows: images, or parts of a stream.

  The standard error treats the mean of each block of positions as an
  independent sample.

  Args:
    length: the number L of positions in a window.
    block: the number of scored positions in a block. If None, each window is a
      block, as for images and labels.

  Attributes:
    bits_L: the sum over windows of the bits at each position, float64 [L].
    counts_L: the number of windows that score each position, int64 [L].
    windows: the number of windows added so far.
  """

  def __init__(self, length: int, block: int | None = None):
    self.bits_L = np.zeros(length)
    self.counts_L = np.zeros(length, np.int64)
    self.windows = 0
    self._hits: int | None = None  # labels that are predicted correctly
    self._block = block or length
    self._open = np.zeros(0)  # bits at the positions of an unfinished block
    # The number of blocks, the sum of their mean bits, and the sum of squares
    # of their mean bits, from which the variance is computed.
    self._moments = np.zeros(3)

  def add(
    self,
    nats_BL: np.ndarray,
    scored_BL: np.ndarray,
    hits_B: np.ndarray | None = None,
  ) -> None:
    """Adds a batch of windows. Batches must follow the order of the split.

    Args:
      nats_BL: the loss at each position in nats.
      scored_BL: whether each position is scored, bool.
      hits_B: for a classifier, whether the label of each window is predicted
        correctly, bool.
    """
    if hits_B is not None:
      self._hits = (self._hits or 0) + int(hits_B.sum())

    # Use float64, because a float32 sum of millions of losses loses precision.
    bits_BL = np.where(scored_BL, np.asarray(nats_BL, np.float64), 0)
    bits_BL = bits_BL / math.log(2)
    self.bits_L += bits_BL.sum(0)
    self.counts_L += scored_BL.sum(0)
    self.windows += len(bits_BL)

    # A block may continue in the next window, because windows are consecutive
    # parts of a stream.
    bits = np.concatenate([self._open, bits_BL[scored_BL]])
    end = len(bits) - len(bits) % self._block
    means = bits[:end].reshape(-1, self._block).mean(1)
    self._moments += [len(means), means.sum(), (means**2).sum()]
    self._open = bits[end:]

  @property
  def tokens(self) -> int:
    """The number of positions that were scored."""
    return int(self.counts_L.sum())

  @property
  def bits_per_dim(self) -> float | None:
    """The mean bits over all scored positions, or None if there are none."""
    return float(self.bits_L.sum()) / self.tokens if self.tokens else None

  @property
  def standard_error(self) -> float | None:
    """The standard error of `bits_per_dim`; None for fewer than two blocks.

    The standard error is the square root of a ratio: the variance of block
    means over the number of blocks. An unfinished block counts as a fraction of
    a block.
    """
    blocks, means, squares = self._moments
    if blocks < 2:
      return None

    # If means are equal, rounding may make the variance negative.
    variance = max(0, squares - means**2 / blocks) / (blocks - 1)
    return math.sqrt(variance * self._block / self.tokens)

  @property
  def accuracy(self) -> float | None:
    """The fraction of labels predicted correctly, or None without labels."""
    return None if self._hits is None else self._hits / self.windows

  @property
  def accuracy_error(self) -> float | None:
    """The standard error of `accuracy`; None for fewer than two labels."""
    if self.accuracy is None or self.windows < 2:
      return None

    # This is the standard error of a mean of independent Bernoulli trials.
    variance = self.accuracy * (1 - self.accuracy)
    return math.sqrt(variance / (self.windows - 1))

  def means(self, channels: int | None = None) -> np.ndarray:
    """Returns the mean bits at each position, float64 [L].

    The mean is nan at positions that no window scores. With `channels`, returns
    the mean over the positions of each channel, float64 [channels].
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
    losses: the function that `step.make_losses` returns, with parameters bound.
    windows: pairs (tokens [L], is scored [L]), as data sources return them.
      Windows are read one batch at a time, and each process reads only the
      windows that its own devices hold.
    batch_size: the number of windows per batch.
    sharding: the sharding of batches.
    block: the block size, see `Tally`.
    check_stop: a function called before each batch, which may raise an
      exception to stop.
  """
  tally = Tally(len(windows[0][1]), block)
  silent = not processes.is_first()
  with progress("scoring", len(windows), silent=silent) as advance:
    for start in range(0, len(windows), batch_size):
      check_stop()
      # Pad the last batch, so that a single program scores all batches.
      num = min(batch_size, len(windows) - start)
      tokens_BL, scored_BL = _place(windows, start, batch_size, sharding)
      with jax.set_mesh(cast(Mesh, sharding.mesh)):
        result = losses(tokens_BL)

      # Each process accumulates the whole batch, without padding rows. A
      # classifier also returns hits.
      batch = process_allgather((scored_BL, result), tiled=True)
      scored_BL, nats_BL, *hits_B = [x[:num] for x in jax.tree.leaves(batch)]
      tally.add(nats_BL, scored_BL, *hits_B)
      advance(num)

  return tally


def _place(windows, start, batch_size, sharding):
  """Places a batch of windows on devices, and returns (tokens_BL, scored_BL).

  Rows after the last window contain zeros, which are not scored.
  """

  # Reading a window returns both parts, so cache it to read each window once.
  @functools.cache
  def read(i):
    if start + i < len(windows):
      return windows[start + i]
    return [np.zeros_like(x) for x in windows[0]]

  def place(part):
    shape = batch_size, len(windows[0][part])
    return processes.place(lambda i: read(i)[part], shape, sharding)

  return place(0), place(1)
