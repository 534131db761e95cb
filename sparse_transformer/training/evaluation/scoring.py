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
from sparse_transformer.training import step as step_lib
from sparse_transformer.training.distributed import processes

Losses = Callable[[Any, Any], Any]

# Scored positions of a stream whose mean is one draw of the standard error.
# Losses of text are correlated over thousands of bytes: of an order-4 model of
# Wikipedia, blocks of 128, 1,024, 4,096, 16,384 and 65,536 bytes give errors in
# the ratios 1, 1.7, 2.4, 3.4 and 4.3.
BLOCK = 16_384


def make_losses(apply: Callable[..., jax.Array]) -> Losses:
  """Jitted (params, tokens_BL) -> nats of each position [B, L].

  For a classifier, (nats of each label [B, 1], whether it is right [B]).
  """

  def losses(params, tokens_BL):
    logits = apply(params, tokens_BL)
    nats_BL = step_lib.position_losses(logits, tokens_BL)
    if logits.ndim == 2:
      return nats_BL, step_lib.hits(logits, tokens_BL)
    return nats_BL

  return jax.jit(losses)


class Tally:
  """Bits of the windows scored so far: images, or parts of a stream.

  Args:
    length: positions in a window, L.
    block: scored positions in a block; None: the positions of a window, as for
      images and labels. The standard error takes blocks as independent.
  """

  def __init__(self, length: int, block: int | None = None):
    self.bits_L = np.zeros(length)  # sums over windows
    self.counts_L = np.zeros(length, np.int64)  # windows that score a position
    self.windows = 0
    self._hits: int | None = None  # labels that are predicted
    self._block = block or length
    self._open = np.zeros(0)  # bits of the positions of an unfinished block
    # The number of blocks, and the sums of their mean bits and their squares.
    self._moments = np.zeros(3)

  def add(
    self,
    nats_BL: np.ndarray,
    scored_BL: np.ndarray,
    hits_B: np.ndarray | None = None,
  ) -> None:
    """Adds windows in order: losses, which of them count, predicted labels."""
    if hits_B is not None:
      self._hits = (self._hits or 0) + int(hits_B.sum())
    bits_BL = np.where(scored_BL, np.asarray(nats_BL, np.float64), 0)
    bits_BL = bits_BL / math.log(2)
    self.bits_L += bits_BL.sum(0)
    self.counts_L += scored_BL.sum(0)
    self.windows += len(bits_BL)
    bits = np.concatenate([self._open, bits_BL[scored_BL]])
    end = len(bits) - len(bits) % self._block
    means = bits[:end].reshape(-1, self._block).mean(1)
    self._moments += [len(means), means.sum(), (means**2).sum()]
    self._open = bits[end:]

  @property
  def tokens(self) -> int:
    """How many positions were scored."""
    return int(self.counts_L.sum())

  def summary(self) -> dict[str, Any]:
    """The result so far.

    Returns:
      `bits_per_dim`, None if nothing was scored; its `standard_error`, None for
      fewer than two blocks; how many `examples`, windows, and scored `tokens`;
      of labels, the `accuracy` and its `accuracy_error`, a standard error.
    """
    total, error = self.tokens, None
    n, accuracy = self.windows, {}
    blocks, means, squares = self._moments
    if blocks > 1:
      # Rounding may take the variance of equal means below 0.
      variance = max(0, squares - means**2 / blocks) / (blocks - 1)
      error = math.sqrt(variance * self._block / total)
    if self._hits is not None:
      p = self._hits / n
      spread = math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else None
      accuracy = dict(accuracy=p, accuracy_error=spread)
    return accuracy | dict(
      bits_per_dim=float(self.bits_L.sum()) / total if total else None,
      standard_error=error,
      examples=n,
      tokens=total,
    )

  def means(self, channels: int | None = None) -> np.ndarray:
    """Mean bits at each position [L], or of each channel; nan: not scored."""
    bits, counts = (
      x.reshape(-1, channels or len(x)).sum(0)
      for x in (self.bits_L, self.counts_L)
    )
    return np.where(counts, bits / np.maximum(counts, 1), np.nan)


def bits_per_dim(
  losses: Callable[[Any], Any],
  windows: Sequence,
  *,
  batch_size: int,
  sharding: NamedSharding,
  tally: Tally | None = None,
  check_stop: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
  """Scores windows of a split; returns their `Tally.summary`.

  Args:
    losses: from `make_losses`, with the parameters of a network bound.
    windows: pairs (tokens, scored), as the sources of `data` return them; read
      one batch at a time; each process reads its devices' part.
    batch_size, sharding: of the batches.
    tally: to add to; it has what was scored even if an exception ends the work.
    check_stop: called before each batch; may raise an exception.
  """
  tally = Tally(len(windows[0][1])) if tally is None else tally
  silent = not processes.is_first()
  with progress("scoring", len(windows), silent=silent) as advance:
    for start in range(0, len(windows), batch_size):
      check_stop()
      num = min(batch_size, len(windows) - start)
      tokens_BL, scored_BL = _place(windows, start, batch_size, sharding)
      with jax.set_mesh(cast(Mesh, sharding.mesh)):
        nats_BL, *hits_B = jax.tree.leaves(losses(tokens_BL))
      found = process_allgather((nats_BL, scored_BL, *hits_B), tiled=True)
      tally.add(*(x[:num] for x in found))
      advance(num)
  return tally.summary()


def _place(windows, start, batch_size, sharding):
  """(tokens, which are scored) of a batch of windows; none after the last."""

  @functools.cache
  def read(i):
    if start + i < len(windows):
      return windows[start + i]
    return [np.zeros_like(x) for x in windows[0]]

  def place(part):
    shape = batch_size, len(windows[0][part])
    return processes.place(lambda i: read(i)[part], shape, sharding)

  return place(0), place(1)
