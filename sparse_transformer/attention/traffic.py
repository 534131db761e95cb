"""What devices send each other in attention, known before it is compiled."""

import dataclasses

from sparse_transformer.attention import spread
from sparse_transformer.attention.contract import Case, Executor
from sparse_transformer.patterns import Pattern, shorten

OVER_HEADS = "all-to-all over heads"


@dataclasses.dataclass(frozen=True)
class Traffic:
  """What a device receives for one part of a pattern.

  Attributes:
    part: the part.
    num_heads: heads that have it.
    tile: positions on a side of its tiles.
    dealing: which queries a device computes: "slices" or "zigzag" of their
      order, or "heads": all of its heads.
    queries, keys: what moves them: "none", "permute", "all-to-all",
      "all-gather" or "all-to-all over heads".
    positions_of_queries, positions_of_keys: how many a device receives of each
      array, those of some of the heads in proportion.
    forward, backward: bytes that a device receives in each pass. Results are
      counted as executors in plain XLA compute them, in float32 or wider.
    imbalance: tiles of the device with the most, by the mean.
  """

  part: str
  num_heads: int
  tile: int
  dealing: str
  queries: str
  keys: str
  positions_of_queries: float
  positions_of_keys: float
  forward: int
  backward: int
  imbalance: float

  @property
  def positions(self) -> float:
    """Positions that a device receives of q, k, v and the output together."""
    return 2 * (self.positions_of_queries + self.positions_of_keys)


def traffic(
  executor: Executor,
  patterns: tuple[Pattern, ...],
  case: Case,
  num_devices: int,
  tile: int = 0,
) -> list[Traffic]:
  """What a device receives for each part.

  Args:
    executor: runs them.
    patterns: one per head.
    case: what is run: sequences and heads of a device, whose positions are
      split over devices, and the length of whole sequences.
    num_devices: that positions are split over.
    tile: positions on a side of a tile; 0 chooses automatically.
  """
  for pattern in patterns:
    if pattern.contents():
      return [_of_content(pattern, case, num_devices, tile)]
  decisions = spread.decide(executor, patterns, case, tile, num_devices)
  return [_of_part(x, case, num_devices) for x in decisions]


def _of_part(decision, case, num_devices):
  shares = decision.shares
  if shares is None:
    received = _over_heads(case.length, num_devices)
    kinds, sizes, dealing = (OVER_HEADS,) * 2, (received,) * 2, "heads"
    imbalance = 1.0
  else:
    sides = shares.queries.moves, shares.keys.moves
    kinds, sizes = zip(*((x.kind, x.received) for x in sides), strict=True)
    dealing = shares.dealing
    imbalance = float(shares.tiles.max() / shares.tiles.mean())
  lanes = case.batch * decision.num_heads
  forward, backward = _bytes(case, *sizes)
  return Traffic(
    shorten(decision.part),
    decision.num_heads,
    decision.tile,
    dealing,
    *kinds,
    *sizes,
    round(lanes * forward),
    round(lanes * backward),
    imbalance,
  )


def _over_heads(n, num_devices):
  """Positions that a device receives, as a share of those of all heads."""
  return n * (num_devices - 1) / num_devices**2


def _bytes(case, of_queries, of_keys):
  """Bytes of one sequence and head: (forward, backward)."""
  item, wide = _sizes(case)
  k, e = case.qk_width, case.value_width
  forward = of_queries * (k * item + (e + 1) * wide) + of_keys * (k + e) * item
  backward = of_queries * ((k + e) * item + (2 + k) * wide)
  backward += of_keys * (k + e) * (item + wide)
  return forward, backward


def _of_content(pattern, case, num_devices, tile):
  """Everything runs with all positions of some heads."""
  item, wide = _sizes(case)
  k, e = case.qk_width, case.value_width
  received = _over_heads(case.length, num_devices)
  each_way = received * (2 * (k + e) * item + wide)
  size = round(case.batch * case.num_heads * each_way)
  return Traffic(
    shorten(pattern),
    case.num_heads,
    tile,
    "heads",
    *(OVER_HEADS,) * 2,
    *(received,) * 2,
    size,
    size,
    1.0,
  )


def _sizes(case):
  item = dict(bfloat16=2, float16=2, float32=4, float64=8)[case.dtype]
  return item, max(4, item)
