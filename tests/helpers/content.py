"""Patterns that follow the content, by their definition, and ones that leak.

All are plain NumPy, for one head of one sequence: masks [n, n] from queries and
keys [n, K]; `over_heads` calls them for all sequences and heads.
"""

import functools

import numpy as np

from sparse_transformer import patterns

# How much better a choice must be than the next: more than what float32 rounds.
# A tie would be decided by rounding.
MARGIN = 1e-6


def best(scores, num):
  """Where the largest numbers of each row are, which must not be close."""
  order = np.argsort(-scores, axis=1)
  if num < scores.shape[1]:
    ranked = np.take_along_axis(scores, order, axis=1)
    margin = (ranked[:, num - 1] - ranked[:, num]).min()
    assert margin > MARGIN, f"a tie, within {margin}: take other inputs"
  return order[:, :num]


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def last(labels, window, past):
  """The last keys of the past with the query's label; labels are [n, 1]."""
  same = (labels == labels.T) & past
  rank = same[:, ::-1].cumsum(1)[:, ::-1]  # 1 for the last one
  return same & (rank <= window)


def lsh_labels(q, vectors):
  """Buckets [n, 1] of queries, of one round with vectors [buckets / 2, K]."""
  products = q @ vectors.T
  return best(np.concatenate([products, -products], axis=1), 1)


def lsh(q, vectors, window):
  """Kitaev et al. 2020, section 2, where a query sees its past only.

  Args:
    vectors: directions [rounds, buckets / 2, K].
  """
  n = len(q)
  past = np.tri(n, k=-1, dtype=bool)
  mask = np.zeros((n, n), bool)
  for of_round in vectors:
    mask |= last(lsh_labels(q, of_round), window, past)
  alone = ~mask.any(1, keepdims=True)
  return mask | (alone & np.eye(n, dtype=bool))


def routing(q, centroids, window):
  """Roy et al. 2020, where a query sees its past only."""
  labels = best(unit(q) @ unit(centroids).T, 1)
  return last(labels, window, np.tri(len(q), dtype=bool))


def top_blocks(q, k, size, num):
  """Lu et al. 2025, section 2.2, without a query's own block."""
  n = len(q)
  mask = np.zeros((n, n), bool)
  for t in range(size, n):
    past = t // size
    means = k[: past * size].reshape(past, size, -1).mean(1)
    for block in best((means @ q[t])[None], num)[0]:
      mask[t, block * size : (block + 1) * size] = True
  return mask


def moba(q, k, size, top_k):
  """Mixture of block attention, Lu et al. 2025, section 2.2.

  A query scores each block by its product with the mean key. Later blocks have
  the score -inf, and its own always counts among the `top_k`, up to itself.
  """
  n = len(q)
  mask = np.zeros((n, n), bool)
  starts = np.arange(0, n, size)
  means = np.stack([k[start : start + size].mean(0) for start in starts])
  for t in range(n):
    scores = means @ q[t]
    scores[starts > t] = -np.inf
    scores[t // size] = np.inf
    for block in np.argsort(-scores)[:top_k]:
      if scores[block] > -np.inf:
        end = min(starts[block] + size, t + 1)
        mask[t, starts[block] : end] = True

  return mask


def by_definition(pattern, q, k, centroids=None):
  """The pairs [B, H, n, n] of a pattern, from the sentences in the docstrings.

  Args:
    pattern: of all heads.
    q, k: queries and keys [B, n, H, K].
    centroids: of `Routing`, [H, clusters, K].
  """
  arrays = [q, k]
  if centroids is not None:
    of_heads = np.swapaxes(centroids, 0, 1)[None]
    arrays.append(np.repeat(of_heads, len(q), 0))
  return over_heads(functools.partial(mask_of, pattern), *arrays)


def over_heads(function, *arrays):
  """Masks [B, H, n, n] of a function of one head; arrays are [B, n, H, K]."""
  arrays = [np.asarray(x, np.float64) for x in arrays]
  batch, _, num_heads, _ = arrays[0].shape

  def of_sequence(b):
    heads = range(num_heads)
    return [function(*(x[b, :, h] for x in arrays)) for h in heads]

  return np.stack([of_sequence(b) for b in range(batch)])


def mask_of(pattern, q, k, centroids=None):
  """The pairs of one head in one sequence."""

  def side(pattern):
    return mask_of(pattern, q, k, centroids)

  match pattern:
    case patterns.Union(left, right):
      return side(left) | side(right)
    case patterns.Intersection(left, right):
      return side(left) & side(right)
    case patterns.Difference(left, right):
      return side(left) & ~side(right)
    case patterns.LSH():
      vectors = pattern.directions(q.shape[1])[0].astype(np.float64)
      vectors = vectors.reshape(pattern.rounds, -1, q.shape[1])
      return lsh(q, vectors, pattern.window)
    case patterns.Routing():
      return routing(q, centroids, pattern.window)
    case patterns.TopBlocks():
      return top_blocks(q, k, pattern.size, pattern.num)
  return pattern.matrix(len(q))


# Forms that leak the future, which the probes must find.


def reformer_chunks(q, vectors, size):
  """Chunks of the sorted sequence, each with the one before it.

  Where chunks begin depends on how many later positions sort before.
  """
  mask = np.zeros((len(q), len(q)), bool)
  for of_round in vectors:
    labels = lsh_labels(q, of_round)
    chunks = labels[:, 0].argsort(kind="stable").argsort() // size
    behind = chunks[:, None] - chunks
    mask |= (labels == labels.T) & ((behind == 0) | (behind == 1))
  return mask & np.tri(len(q), dtype=bool)


def routing_top(q, centroids, window):
  """The queries nearest to each centroid, over the whole sequence."""
  ranks = (-q @ centroids.T).argsort(0).argsort(0)
  member = ranks < window  # [n, clusters]
  return (member[:, None] & member).any(-1) & np.tri(len(q), dtype=bool)
