"""Attention and its gradients in float64 NumPy, from the definition.

The output of query i is a mean of all values v_j, with weights

    p_ij = w_ij exp(s_ij) / (sum_j w_ij exp(s_ij) + exp(sink))

where w_ij is 1 for the pairs of a pattern and 0 for others, or the exponential
of a pair's bias. Scores s_ij are products of queries and keys, times a
scale; with a soft cap c, they are c tanh(s_ij / c).
"""

from typing import NamedTuple

import numpy as np


class Results(NamedTuple):
  """Outputs and gradients, with the axes of what they are the gradients of."""

  out: np.ndarray
  lse: np.ndarray  # log of the sum in the denominator; 0 without keys
  dq: np.ndarray
  dk: np.ndarray
  dv: np.ndarray
  dsinks: np.ndarray
  dweights: np.ndarray | None  # of pairs [B, H, n, n], if weights are no mask


def outputs(q, k, v, **options):
  """(out, lse) of `attention`."""
  rows = q.shape[:3]
  dout = np.zeros((*rows, v.shape[3]))
  return attention(q, k, v, dout, np.zeros(rows), **options)[:2]


def attention(
  q, k, v, dout, dlse, *, weights, scale=None, softcap=0.0, sinks=None
):
  """All results of attention.

  Args:
    q: queries [B, n, H, K].
    k, v: keys [B, n, G, K] and values [B, n, G, E], each for H / G heads.
    dout, dlse: gradients of the outputs [B, n, H, E] and of lse [B, n, H].
    weights: of pairs [..., H, n, n], bool or float.
    scale: the factor of scores, or None for 1 / sqrt(K).
    softcap: c, or 0 for none.
    sinks: a number for each head, [H], or None.
  """
  batch, n, num_heads, width = q.shape
  group = num_heads // k.shape[2]
  k = np.repeat(np.asarray(k), group, 2)
  v = np.repeat(np.asarray(v), group, 2)
  # Heads before positions, so that products are those of matrices.
  q, k, v, dout, dlse = (
    np.asarray(x).astype(np.float64).swapaxes(1, 2)
    for x in (q, k, v, dout, dlse)
  )
  if scale is None:
    scale = 1 / np.sqrt(width)
  if sinks is None:
    sinks = np.full(num_heads, -np.inf)
  sinks = np.asarray(sinks, np.float64)[:, None, None]

  scores = q @ k.swapaxes(2, 3) * scale
  slope = 1
  if softcap:
    scores = softcap * np.tanh(scores / softcap)
    slope = 1 - (scores / softcap) ** 2

  known = np.where(weights > 0, scores, -np.inf)
  top = np.maximum(known.max(-1, keepdims=True), sinks)
  top = np.where(np.isneginf(top), 0, top)
  terms = weights * np.exp(known - top)
  total = terms.sum(-1, keepdims=True) + np.exp(sinks - top)
  total = np.where(total == 0, 1, total)  # without keys
  lse = np.log(total) + top
  p = terms / total
  out = p @ v

  # The gradients of log w + s, then of products.
  of_rows = dlse[..., None] - (dout * out).sum(-1, keepdims=True)
  of_pairs = dout @ v.swapaxes(2, 3) + of_rows
  ds = p * of_pairs * slope * scale
  dsinks = (np.exp(sinks - lse) * of_rows).sum((0, 2, 3))
  dweights = None
  if weights.dtype != bool:
    dweights = np.exp(scores - lse) * of_pairs

  def of_key_heads(x):
    """Sums over the query heads of each key head."""
    return x.reshape(batch, -1, group, n, x.shape[-1]).sum(2)

  return Results(
    out=out.swapaxes(1, 2),
    lse=lse[..., 0].swapaxes(1, 2),
    dq=(ds @ k).swapaxes(1, 2),
    dk=of_key_heads(ds.swapaxes(2, 3) @ q).swapaxes(1, 2),
    dv=of_key_heads(p.swapaxes(2, 3) @ dout).swapaxes(1, 2),
    dsinks=dsinks,
    dweights=dweights,
  )
