"""Bits per dim over a split: every position counted once."""

import math
import sys

import jax
import numpy as np
import tqdm

from sparse_transformer.training import step as training


def make_losses(apply):
  """The jitted function (params, tokens_BL) -> nats of each position [B, L].

  apply: from `training.make_apply`.
  """

  def losses(params, tokens_BL):
    return training.position_losses(apply(params, tokens_BL), tokens_BL)

  return jax.jit(losses)


class Tally:
  """Bits of the windows seen so far, in sums whose size does not grow.

  A window is an image, or a part of a stream. Float64: exact to far more than
  is reported.
  """

  def __init__(self, length):
    self.bits_L = np.zeros(length)  # of each place in the window, summed
    self.counts_L = np.zeros(length, np.int64)
    self.windows = 0
    self._squares = np.zeros((2, 2))  # of bits and counts of windows, summed

  def add(self, nats_BL, scored_BL):
    """Counts windows: the nats of their positions, and which of them count."""
    bits_BL = np.where(scored_BL, np.asarray(nats_BL, np.float64), 0)
    bits_BL = bits_BL / math.log(2)
    self.bits_L += bits_BL.sum(0)
    self.counts_L += scored_BL.sum(0)
    self.windows += len(bits_BL)
    of_windows = np.stack([bits_BL.sum(1), scored_BL.sum(1)])
    self._squares += of_windows @ of_windows.T

  def summary(self):
    """A dict: bits_per_dim, its standard_error over windows, or None where
    they are too few, examples (windows) and tokens (scored positions)."""
    total, n = int(self.counts_L.sum()), self.windows
    if not total:
      return dict(bits_per_dim=None, standard_error=None, examples=n, tokens=0)
    ratio = self.bits_L.sum() / total
    # Of a ratio of two sums over windows, which may differ in length: the sum
    # of (bits - ratio * count) ** 2, which rounding may take below 0.
    weights = np.array([1, -ratio])
    spread = max(0, weights @ self._squares @ weights)
    error = math.sqrt(spread * n / max(1, n - 1)) / total
    return dict(
      bits_per_dim=float(ratio),
      standard_error=float(error) if n > 1 else None,
      examples=n,
      tokens=total,
    )

  def by_position(self):
    """Mean bits of each place in the window [L]; nan where none counted."""
    return _ratio(self.bits_L, self.counts_L)

  def by_channel(self, channels):
    """Mean bits of each channel of an image, whose bytes take turns."""
    bits, counts = (
      x.reshape(-1, channels).sum(0) for x in (self.bits_L, self.counts_L)
    )
    return _ratio(bits, counts)


def _ratio(bits, counts):
  return np.where(counts, bits / np.maximum(counts, 1), np.nan)


def bits_per_dim(
  losses, params, windows, *, batch_size, sharding, name=None, tally=None
):
  """Scores windows of a split: `Tally.summary` of them.

  losses: from `make_losses`. windows: random access to (tokens, scored), as
  the sources of `data` give them. The last batch is padded with windows that
  do not count. name: shows progress under that name on a terminal. tally: to
  count in; it holds what was scored even where the work was stopped.
  """
  tally = Tally(len(windows[0][0])) if tally is None else tally
  starts = range(0, len(windows), batch_size)
  bar = tqdm.tqdm(
    starts, desc=name, leave=False, disable=not (name and sys.stderr.isatty())
  )
  for start in bar:
    batch = [
      windows[i] for i in range(start, min(start + batch_size, len(windows)))
    ]
    tokens_BL, scored_BL = map(np.stack, zip(*batch, strict=True))
    padding = ((0, batch_size - len(batch)), (0, 0))
    tokens_BL = jax.device_put(np.pad(tokens_BL, padding), sharding)
    tally.add(np.asarray(losses(params, tokens_BL))[: len(batch)], scored_BL)
    if name:
      bar.set_postfix_str(f"{tally.summary()['bits_per_dim']:.4f}")
  return tally.summary()
