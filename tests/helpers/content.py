"""Patterns that follow the content, by their definition, and ones that leak.

All are plain NumPy, pair by pair or nearly so: masks [B, H, n, n] from queries
and keys [B, n, H, K].
"""

import functools

import numpy as np

from sparse_transformer import patterns


def by_definition(pattern, q, k, centroids=None):
  """The pairs of a pattern, from the sentences in the docstrings.

  Args:
    pattern: of all heads.
    q, k: queries and keys [B, n, H, K].
    centroids: of `Routing`, [H, clusters, K].
  """
  side = functools.partial(
    by_definition,
    q=q,
    k=k,
    centroids=centroids,
  )
  match pattern:
    case patterns.Union(left, right):
      return side(left) | side(right)
    case patterns.Intersection(left, right):
      return side(left) & side(right)
    case patterns.Difference(left, right):
      return side(left) & ~side(right)
  if not pattern.contents():
    return pattern.matrix(q.shape[1])[None, None]
  q, k = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (q, k))
  match pattern:
    case patterns.LSH():
      labels = lsh_labels(pattern, q)
      mask = in_last(labels, pattern.window, with_self=False).any(-1)
      alone = ~mask.any(-1, keepdims=True)
      return mask | (alone & np.eye(q.shape[2], dtype=bool))
    case patterns.Routing():
      labels = routing_labels(q, centroids)
      return in_last(labels[..., None], pattern.window).any(-1)
    case patterns.AdaptiveSpan(
      longest, ramp
    ):  # with a span of half the longest
      distance = np.arange(q.shape[2])[:, None] - np.arange(q.shape[2])
      weight = np.clip((ramp + longest / 2 - distance) / ramp, 0, 1)
      return ((weight > 0) & (distance >= 0))[None, None]
    case patterns.TopBlocks():
      scores, is_past = block_scores(q, k, pattern.size)
      return of_blocks(chosen(scores, is_past, pattern.num), pattern.size)


def lsh_labels(pattern, q):
  """Buckets [B, H, n, rounds] of queries [B, H, n, K]."""
  vectors = pattern.directions(q.shape[-1])[0].astype(np.float64)
  products = q @ vectors.T
  products = products.reshape(*q.shape[:3], pattern.rounds, -1)
  return np.concatenate([products, -products], -1).argmax(-1)


def routing_labels(q, centroids):
  """The cluster [B, H, n] whose centroid is nearest, both at unit length."""
  c = np.asarray(centroids, np.float64)[:, None]
  q, c = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, c))
  return np.linalg.norm(q[:, :, :, None] - c, axis=-1).argmin(-1)


def in_last(labels, window, with_self=True):
  """Whether each key is among the last of the query's label, [..., n, n, R]."""
  b, h, n, rounds = labels.shape
  mask = np.zeros((b, h, n, n, rounds), bool)
  for i, j, t, r in np.ndindex(b, h, n, rounds):
    end = t + 1 if with_self else t
    same = np.flatnonzero(labels[i, j, :end, r] == labels[i, j, t, r])
    mask[i, j, t, same[-window:], r] = True
  return mask


def block_scores(q, k, size):
  """Products of queries and mean keys, and which blocks are past."""
  n = q.shape[2]
  starts = np.arange(0, n, size)
  means = np.stack([k[:, :, s : s + size].mean(2) for s in starts], 2)
  own = np.arange(n) // size
  return q @ means.swapaxes(2, 3), np.arange(len(starts)) < own[:, None]


def chosen(scores, allowed, num):
  """The best of the blocks that are allowed: bool [B, H, n, blocks]."""
  scores = np.where(allowed, scores, -np.inf)
  ranks = (-scores).argsort(-1, kind="stable").argsort(-1, kind="stable")
  return (ranks < num) & np.isfinite(scores)


def of_blocks(is_chosen, size):
  """The pairs of chosen blocks, [B, H, n, n]."""
  n = is_chosen.shape[2]
  return np.repeat(is_chosen, size, -1)[..., :n]


def moba(q, k, size, top_k):
  """Mixture of block attention, Lu et al. 2025, section 2.2.

  A query scores each block by its product with the mean key. Later blocks have
  the score -inf, and its own always counts among the `top_k`, up to itself.
  """
  batch, n, heads, _ = q.shape
  mask = np.zeros((batch, heads, n, n), bool)
  starts = np.arange(0, n, size)
  for b, t, h in np.ndindex(q.shape[:3]):
    scores = np.array(
      [q[b, t, h] @ k[b, s : s + size, h].mean(0) for s in starts]
    )
    scores[starts > t] = -np.inf
    scores[t // size] = np.inf
    for block in np.argsort(-scores)[:top_k]:
      if scores[block] > -np.inf:
        mask[b, h, t, starts[block] : min(starts[block] + size, t + 1)] = True

  return mask


# Forms that leak the future, which the probes must find.


def causal(mask):
  return mask & np.tri(mask.shape[-1], dtype=bool)


LSH_OF_CHUNKS = patterns.LSH(16, 32, 4)


def reformer_chunks(q, k, pattern=LSH_OF_CHUNKS):
  """Chunks of the sorted sequence, each with the one before it.

  Where chunks begin depends on how many later positions sort before.
  """
  del k
  labels = lsh_labels(pattern, q.swapaxes(1, 2))
  mask = np.zeros((*labels.shape[:2], *labels.shape[2:3] * 2), bool)
  for r in range(pattern.rounds):
    label = labels[..., r]
    order = label.argsort(-1, kind="stable")
    chunk = order.argsort(-1) // pattern.window
    behind = chunk[..., :, None] - chunk[..., None, :]
    same = label[..., :, None] == label[..., None, :]
    mask |= same & ((behind == 0) | (behind == 1))

  return causal(mask)


def routing_top(q, k, clusters=8, window=32):
  """The queries nearest to each centroid, over the whole sequence."""
  del k
  q = q.swapaxes(1, 2)
  c = np.random.RandomState(0).standard_normal((clusters, q.shape[-1]))
  ranks = (-(q @ c.T)).argsort(2).argsort(2)
  member = ranks < window  # [B, H, n, clusters]
  return causal((member[:, :, :, None] & member[:, :, None]).any(-1))
