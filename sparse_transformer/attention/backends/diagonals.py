"""Attention with a bias by distance, in plain XLA, along diagonals of tiles.

Each step processes pairs of a query tile and a key tile that are all at the
same distance. These pairs share one tile of the bias, so only one is made per
step. Distances at which the bias is -inf are skipped. Which distances these are
is known only at run time. KV heads run one after another, because each may skip
different distances.

Examples of a bias by distance are T5 (Raffel et al. 2020, arXiv 1910.10683,
section 2.1) and ALiBi (Press et al. 2022, arXiv 2108.12409).

Axes, besides those of `xla`: V distances between tiles, D distances between
positions.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import contract, online_softmax
from sparse_transformer.attention.backends import xla
from sparse_transformer.attention.heads import group_heads, index_of
from sparse_transformer.attention.orders import make_order
from sparse_transformer.patterns import Pattern
from sparse_transformer.patterns.catalogue import Full

TILE = 128  # positions
# The most scores of a step, over all sequences. On CPUs, they should fit in
# cache.
CPU_SCORES = 131_072
SCORES = 2**25
OUTSIDE = 2**30  # larger than any index of a bias


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Tables:
  """The steps of one pattern.

  Each group of query tiles has a step for each distance.
  """

  steps: xla.StepTables
  # int32 [V], the distance from the first key of a key tile to the first query
  # of the query tile that meets it.
  distances: contract.Table
  bias: jax.Array  # [H, D], with distance 0 in the middle


def plans(
  request: contract.Request,
  bias_HD: jax.Array,
  num_queries: int,
  first: jax.Array | None,
) -> contract.Plans:
  """Makes the plans of all heads, one for each distinct pattern.

  Args:
    request: the request for this device.
    bias_HD: the bias by distance of the device's heads.
    num_queries: number of queries on this device, L.
    first: the position of the first query of a slice; None for all queries.
  """
  n = request.length
  tile = tile_size(request)
  plans = []
  by_pattern = group_heads([(pattern,) for pattern in request.patterns])
  for pattern, heads in by_pattern.items():
    if not pattern.pairs(n):
      continue

    # All groups have equal sizes, so the last one may contain tiles without
    # queries.
    distances_V, cols = _steps(pattern, request, num_queries, first is not None)
    num_groups, _, size = cols.shape
    num_places = num_groups * size * tile
    query_order = make_order(np.arange(num_queries), num_places, first)
    key_order = make_order(np.arange(n), -(-n // tile) * tile)

    steps = xla.StepTables(
      first=len(distances_V) * np.arange(num_groups + 1, dtype=np.int32),
      cols=cols.reshape(-1, size, 1),
      single=False,
      num_keys=0 if first is None else tile,
    )
    tables = Tables(
      steps=steps,
      distances=distances_V * tile + (0 if first is None else first),
      bias=bias_HD[index_of(heads, request.num_heads)],
    )
    plan = contract.Plan(
      pattern=pattern,
      tile=tile,
      tables=tables,
      queries=query_order,
      keys=key_order,
    )
    plans.append((plan, heads))
  return plans


def tile_size(request: contract.Request) -> int:
  """Returns the number of positions on a side of a tile."""
  return min(request.tile or TILE, request.length)


def most_scores(pattern: Pattern, request: contract.Request) -> int:
  """Returns the number of scores per head and sequence if no bias is -inf."""
  if not pattern.pairs(request.length):
    return 0
  _, cols = _steps(pattern, request, request.length, is_slice=False)
  num_steps = 0
  for cols_VA in cols:
    # A loop runs from the first distance with tiles to the last, and also
    # computes the distances between them that have no tiles.
    needed = np.flatnonzero((cols_VA >= 0).any(1))
    if len(needed):
      num_steps += int(needed[-1] - needed[0]) + 1
  return num_steps * cols.shape[2] * tile_size(request) ** 2


def _steps(pattern, request, num_queries, is_slice):
  """Finds the steps of a pattern, one for each group and distance of tiles.

  Args:
    pattern: the pattern. Its pairs determine which distances have tiles.
    request: the request. Its tile and platform determine the size of steps.
    num_queries: number of queries, L.
    is_slice: whether the queries are a slice, whose first position is known
      only at run time.

  Returns:
    The distances in units of tiles, ascending, int [V]; and the key tile that
    each query tile meets, -1 for none, int32 [groups, V, A].
  """
  n = request.length
  tile = tile_size(request)
  num_rows = -(-num_queries // tile)
  num_cols = -(-n // tile)

  # A group contains as many query tiles as the limit on scores allows.
  limit = CPU_SCORES if request.platform == "cpu" else SCORES
  scores = (request.batch or 1) * request.group * tile**2
  num_groups = -(-num_rows // max(1, limit // scores))
  size = -(-num_rows // num_groups)
  rows = np.arange(num_groups * size).reshape(num_groups, 1, size)

  # The first position of a slice is known only at run time, so any distance may
  # occur.
  distances_V = np.arange(1 - num_cols, num_rows)
  if not is_slice:
    # Tiles are laid out in natural order, instead of in the pattern's own
    # orders.
    layout = (Full() & pattern).layout(n, tile)
    distances_V = np.unique(layout.rows - layout.cols)

  # There are no tiles outside the sequence.
  cols = rows - distances_V[:, None]
  is_tile = (cols >= 0) & (cols < num_cols) & (rows < num_rows)
  cols = np.where(is_tile, cols, -1).astype(np.int32)
  return distances_V, cols


def forward(
  plan: contract.Plan, queries: contract.Queries, keys: contract.Keys
) -> tuple[jax.Array, ...]:
  """See `contract.Runner`."""
  return _each_head(online_softmax.forward, plan, queries, keys)


def backward(
  plan: contract.Plan, queries: contract.Queries, keys: contract.Keys
) -> tuple[jax.Array, ...]:
  """See `contract.Runner`."""
  dq, dk, dv, dbias = _each_head(online_softmax.backward, plan, queries, keys)
  return dq, dk, dv, dbias.reshape(plan.tables.bias.shape)


def _each_head(run, plan, queries, keys):
  """Runs KV heads one after another, each with its query heads.

  Args:
    run: `online_softmax.forward` or `online_softmax.backward`.
    plan: a plan of `plans`.
    queries, keys: arrays in the orders of the plan.

  Returns:
    The results of `run` for all heads. The gradient of the bias is [G, R, D].
  """
  num_heads = keys.k.shape[2]

  def run_head(head):
    def take(x, axis):
      size = max(1, x.shape[axis] // num_heads)  # 1 if all heads share it
      return lax.dynamic_slice_in_dim(x, head * size, size, axis)

    own_queries, own_keys = jax.tree.map(
      lambda x: take(x, 2),
      (queries, keys),
    )

    bias_RD = take(plan.tables.bias, 0)
    loop = _Diagonals(plan, own_queries, own_keys, bias_RD)
    return run(loop, own_queries, own_keys, plan.scores)

  def join(x_GBLR):
    x_BLGR = jnp.moveaxis(x_GBLR, 0, 2)
    by_query_head = *x_BLGR.shape[:2], -1
    return x_BLGR.reshape(by_query_head + x_BLGR.shape[4:])

  results = lax.map(run_head, jnp.arange(num_heads))
  joined = tuple(map(join, results[:3]))
  return joined + results[3:]  # the heads of dbias are already in front


class _Diagonals(xla.PlanLoop):
  """The steps of a plan, for one KV head.

  Args:
    plan: the plan of all heads.
    queries, keys: arrays of this KV head and its R query heads.
    bias_RD: the bias of these query heads.
  """

  def __init__(self, plan, queries, keys, bias_RD):
    tables = plan.tables
    plan = dataclasses.replace(plan, tables=tables.steps)
    super().__init__(plan, queries, keys)
    self.bias_RD = bias_RD
    self.dbias = jnp.zeros_like(bias_RD)

    # The index at which the bias of a step's pairs starts.
    middle = bias_RD.shape[1] // 2
    nearest = self.tile - 1  # indices before the distance of a tile
    starts_V = tables.distances + middle - nearest
    self.starts_V = jnp.asarray(starts_V)
    self.within_D = np.arange(2 * self.tile - 1)

    # Distances that have no tiles, or that the bias masks entirely, are
    # skipped.
    is_tile = self.cols >= 0
    has_tiles = is_tile.any((1, 2))
    has_tiles = has_tiles.reshape(self.num, -1)
    places_VD = self.starts_V[:, None] + self.within_D[None]
    is_open_RVD = bias_RD[:, places_VD] > -jnp.inf
    is_open_V = is_open_RVD.any((0, 2))
    self.is_needed = has_tiles & is_open_V[None]

  def bounds(self, i):
    is_needed_V = self.is_needed[i]
    # A loop runs over consecutive steps, from the first that is needed to the
    # last. If none is needed, `begin` and `end` are both 0.
    ends_V = np.arange(1, 1 + len(is_needed_V))
    begin = is_needed_V.argmax()
    end = (is_needed_V * ends_V).max()
    first = self.first[i]
    return first + begin, first + end

  def bias(self, i, j):
    # The distance of query t and key s of a tile is t - s more than the
    # distance of the tile's first query and first key.
    places = np.arange(self.tile)
    within_TS = places[:, None] + places[::-1]
    places_TS = self._start(j) + within_TS
    bias_RTS = self.bias_RD[:, places_TS]
    return bias_RTS.reshape(1, 1, 1, -1, self.tile)

  def add_bias(self, i, j, dbias, ds):
    tile = self.tile
    total = ds.sum((0, 1, 2))
    ds_SRT = total.reshape(tile, -1, tile)
    ds_RST = ds_SRT.swapaxes(0, 1)

    # Sum each diagonal. A row has the gradients of one key. The last key comes
    # first, because it has the smallest distances. Rows are padded and joined,
    # and the padding at the end is removed. When the result is cut into rows
    # that are one entry shorter, each row is shifted by one entry relative to
    # the row before, so that the diagonals become columns.
    flipped_RST = ds_RST[:, ::-1]
    none = 0, 0
    padded = jnp.pad(flipped_RST, (none, none, (0, tile)))
    group = len(padded)
    in_line = padded.reshape(group, -1)
    in_line = in_line[:, :-tile]
    rows_RSD = in_line.reshape(group, tile, -1)
    new_RD = rows_RSD.sum(1)

    # Padding may have distances outside the bias. These are dropped, but
    # negative indices would wrap around, so they are made too large.
    places_D = self._start(j) + self.within_D
    is_negative_D = places_D < 0
    outside_D = places_D + OUTSIDE
    places_D = jnp.where(is_negative_D, outside_D, places_D)
    return dbias.at[:, places_D].add(
      new_RD,
      mode="drop",
      unique_indices=True,
    )

  def _start(self, j):
    return self.starts_V[j % len(self.starts_V)]
