"""Bits per dim over a split: every position counted once."""

import math
import sys

import jax
import numpy as np
import tqdm

from sparse_transformer import training


def make_losses(apply):
  """The jitted function (params, tokens_BL) -> nats of each position [B, L].

  apply: from `training.make_apply`.
  """

  def losses(params, tokens_BL):
    return training.position_losses(apply(params, tokens_BL), tokens_BL)

  return jax.jit(losses)


def bits_per_dim(losses, params, windows, *, batch_size, sharding, name=None):
  """Scores windows of a split.

  losses: from `make_losses`. windows: random access to (tokens, scored), as
  the sources of `data` give them. The last batch is padded with windows that
  do not count. name: shows progress under that name on a terminal.

  Returns a dict: bits_per_dim, its standard_error over windows (an image, or
  a window of a stream), examples (windows) and tokens (scored positions).
  """
  nats, counts = [], []
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
    # Summed in float64 on the host: exact to far more than is reported.
    losses_BL = np.asarray(losses(params, tokens_BL), np.float64)[: len(batch)]
    nats.append((losses_BL * scored_BL).sum(1))
    counts.append(scored_BL.sum(1))
  return summarize(np.concatenate(nats), np.concatenate(counts))


def summarize(nats, counts):
  """Bits per dim of windows with `nats` in all over `counts` positions."""
  bits, total, n = nats / math.log(2), counts.sum(), len(nats)
  ratio = bits.sum() / total
  # Of a ratio of two sums over windows, which may differ in length.
  spread = np.sum((bits - ratio * counts) ** 2)
  error = math.sqrt(spread * n / max(1, n - 1)) / total
  return dict(
    bits_per_dim=float(ratio),
    standard_error=float(error) if n > 1 else None,
    examples=n,
    tokens=int(total),
  )
