"""Every pattern, small: what the tests of all backends run over."""

from sparse_transformer.patterns import (
  BigBird,
  Block,
  Causal,
  Column,
  Dilated,
  Full,
  Global,
  Local,
  LogSparse,
  Longformer,
  Neighborhood,
  Pattern,
  RandomBlocks,
  Row,
  Strided,
  Summary,
)


class Fifths(Pattern):
  """A pattern of a user, with many rows that have no key."""

  def mask(self, q, k):
    return (k < q - 7) & (k % 5 == 3) & (q % 3 != 1)


class Thirds(Pattern):
  """A pattern of a user: the query's third multiples, two rows back."""

  def mask(self, q, k):
    return (k <= q) & (k * 2 % 3 == q % 3) & ((q - k) // 4 != 1)


CAUSAL = (
  Causal(),
  Local(1),
  Local(17),
  Dilated(5, 3),
  Strided(12),
  Block(20),
  Block(6, previous=2),
  Summary(20, 3),
  Summary(20, 3, 1),
  LogSparse(),
  LogSparse(5),
  Global(3),
  RandomBlocks(4, 2),
  RandomBlocks(3, 3, seed=5, first=1, last=2),
  Longformer(7, 2),
  BigBird(4, num_random=2),
  Row(4, 3),
  Column(4, 3),
  Neighborhood(3, 3, 4, 3),
  Local(12) | Strided(12),
  Block(20) | Summary(20, 4),
  (Local(9) - Local(2)) & Strided(3),
  Fifths(),
  Thirds(),
)

BIDIRECTIONAL = (
  Full(),
  Local(7, causal=False),
  Dilated(5, 3, causal=False),
  Strided(12, causal=False),
  Block(6, previous=1, causal=False),
  Summary(20, 3, causal=False),
  Global(3, causal=False),
  RandomBlocks(4, 2, causal=False),
  Longformer(7, 2, causal=False),
  BigBird(4, num_random=2, causal=False),
  Row(4, 3, causal=False),
  Column(4, 3, causal=False),
  Neighborhood(3, 3, 4, 3, causal=False),
  Block(20, causal=False) | Summary(20, 4, causal=False),
)

ALL = CAUSAL + BIDIRECTIONAL
