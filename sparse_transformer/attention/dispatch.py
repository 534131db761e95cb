"""`attend`: the entry point to attention."""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sparse_transformer.attention import (
  arguments,
  exchange,
  online_softmax,
  registry,
  sequence_parallel,
  shard_map,
  vjp,
)
from sparse_transformer.attention.content import selection
from sparse_transformer.attention.contract import Keys, Queries, make_case
from sparse_transformer.attention.executors import dense
from sparse_transformer.attention.orders import apply
from sparse_transformer.attention.vjp import Call
from sparse_transformer.patterns import Pattern, shorten


def attend(
  q_BLHK: jax.Array,
  k_BMGK: jax.Array,
  v_BMGE: jax.Array,
  patterns: Pattern | str | Sequence[Pattern | str],
  *,
  segments_BL: jax.Array | None = None,
  first: jax.Array | int | None = None,
  sinks_H: jax.Array | None = None,
  scale: float | None = None,
  softcap: float = 0.0,
  directions: selection.Directions | None = None,
  backend: str = "auto",
  tile: int = 0,
  spec: PartitionSpec | None = None,
  return_lse: bool = False,
) -> Any:
  """Attention over the pairs of a pattern: softmax(scale q k^T) v.

  B = batch, L = M = n positions, H = heads of queries, G = heads of keys and
  values, K = width of a head's queries and keys, E = width of its values. The
  scores and the softmax are in float32 or wider. A query without keys gets
  output 0 and log-sum-exp -inf, and zero gradients. The batch axis may be
  omitted from all arrays.

  On a mesh, each device runs on its own sequences, positions and heads, within
  `jax.shard_map`. Devices exchange nothing if only sequences and heads are
  split. If positions are, they send each other no more than needed; see
  `attention.sequence_parallel`. Devices whose heads would have different
  patterns, or no whole number of key heads, run all heads instead. Only "dense"
  supports forward-mode differentiation on its own; over reverse mode, as in
  `jax.hessian`, "auto" does also.

  Args:
    q_BLHK: queries [batch, n, heads, K], in float16, bfloat16, float32 or, with
      `jax_enable_x64`, float64.
    k_BMGK: keys [batch, n, key heads, K], in the dtype of the queries. G
      divides H: query head h has key head h // (H // G).
    v_BMGE: values [batch, n, key heads, E]. Their dtype may differ.
    patterns: one pattern for all heads, or a tuple or list with one per query
      head, each a `Pattern` or its text, as in "Local(64) | Strided(64)".
    segments_BL: integers [batch, n], such as the number of the document, or
      another one for padding. Of the pattern's pairs, only those within one
      segment are used. They are converted to int32. Positions are still those
      in the sequence: `Strided` and `Block` do not restart at each segment.
    first: position of the first query, when there are fewer queries than keys;
      an integer that may be traced; a traced one must be at most n - L.
      Segments are those of the n keys. In plain XLA; content-based patterns
      cost as much as with all queries.
    sinks_H: a logit for each query head, which gets a share of the weights but
      has no value. They get gradients.
    scale: factor of the scores, 1 / sqrt(K) by default.
    softcap: c, where scores s become c tanh(s / c) after scaling; 0 for none.
    directions: a mapping from each content-based pattern to the vectors it
      projects queries onto, [heads, directions, K], or with 1 for all heads
      (see `patterns.content`): centroids for `Routing`, which requires them;
      random vectors for `LSH`, by default drawn from its seed. They get
      no gradients. For `AdaptiveSpan`, the spans of its heads in positions,
      [heads] or [1], which get gradients.
    backend: "auto" runs tile by tile in linear memory, with the executor that
      suits the target platform; "dense" is the plain reference
      with n x n memory; any other is the name of an executor.
    tile: positions on a side of a tile; 0 chooses automatically.
    spec: how the mesh in context (`jax.set_mesh`) splits arrays: the axes of
      sequences, of positions and of heads. Within `jax.shard_map`, it is needed
      if positions are split, and the arrays are what a device has. By default,
      the queries' type decides on explicit axes; automatic axes split sequences
      where they divide them evenly.
    return_lse: whether to also return the log-sum-exp.

  Returns:
    out_BLHE in the dtype of the values. With `return_lse` also lse_BLH, the
    log-sum-exp of each query's scores in nats, with its sink, in float32 or
    wider.

  Raises:
    ValueError: arrays, patterns, tile or backend are invalid.
    Unsupported: the given backend cannot run this case.

  >>> import jax, jax.numpy as jnp
  >>> from sparse_transformer import patterns
  >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 1024, 4, 16))
  >>> attend(q, k, v, patterns.Local(64) | patterns.Strided(64)).shape
  (1, 1024, 4, 16)
  """
  queries, keys, first = arguments.check_arrays(
    q_BLHK, k_BMGK, v_BMGE, segments_BL, first
  )
  split = shard_map.split_of(queries.q, spec)
  case = make_case(queries.q, keys.v)
  length = case.length * shard_map.num_devices(queries.q, split.within)
  tile = arguments.check_tile(tile, length)
  case = dataclasses.replace(case, length=length, tile=tile)
  heads = arguments.patterns_of_heads(patterns, case.num_heads, length)
  selection.check_directions(heads, directions or {}, case.qk_width)
  call = Call(
    heads,
    arguments.check_scores(scale, softcap),
    tile,
    registry.choose(backend, case),
    split,
  )
  # Unlike those of a dict, its keys need no order to be a pytree.
  given = collections.OrderedDict(directions or {})
  out, lse = _attend(call, case, queries, keys, given, first)
  if sinks_H is not None:
    sinks_H = arguments.check_sinks(sinks_H, case)
    out, lse = online_softmax.add_sinks(out, lse, sinks_H)
  if q_BLHK.ndim == 3:
    out, lse = out[0], lse[0]
  return (out, lse) if return_lse else out


def _attend(call, case, queries, keys, given, first):
  """(out_BLHE, lse_BLH), compiled if nothing else is."""
  rows = None
  if first is not None:
    _check_slice(call)
    if any(pattern.contents() for pattern in call.patterns):
      rows, first = (first, queries.q.shape[1]), None
      queries = _at_all_positions(queries, keys, rows[0])
  shards = shard_map.num_devices(queries.q, call.split.heads)
  own = call.patterns[: case.num_heads // shards]
  if own * shards != call.patterns or case.num_key_heads % shards:
    split = call.split._replace(heads=())  # each device runs all heads
    call = dataclasses.replace(call, split=split)
  else:
    call = dataclasses.replace(call, patterns=own)
  arrays = queries, keys, given, first
  # Loops that are run eagerly would be compiled at each call.
  run = _on_devices_compiled if _are_concrete(arrays) else _on_devices
  results = run(call, *arrays)
  if rows is None:
    return results
  return [lax.dynamic_slice_in_dim(x, *rows, 1) for x in results]


def _are_concrete(arrays):
  """Whether no program is traced, though derivatives may be."""
  try:
    jax.tree.map(lambda x: jax.extend.core.concrete_or_error(None, x), arrays)
  except jax.errors.ConcretizationTypeError:
    return False
  return True


def _check_slice(call):
  """Raises a ValueError if some queries alone cannot be computed."""
  contents = [c for pattern in call.patterns for c in pattern.contents()]
  if labelled := [c for c in contents if c.num_directions]:
    raise ValueError(
      f"{shorten(labelled[0])} groups the queries of all positions, and cannot"
      " run on some of them; see `init_cache` and `attend_next`"
    )
  if call.split.over_positions:
    raise ValueError("with first, positions cannot be split over devices")


def _at_all_positions(queries, keys, first):
  """The queries at their positions among all, zeros at the others."""
  (batch, _, *rest), n = queries.q.shape, keys.k.shape[1]
  zeros = jnp.zeros_like(queries.q, shape=(batch, n, *rest))
  put = lambda x, y: lax.dynamic_update_slice_in_dim(x, y, first, 1)
  return jax.tree.map(put, Queries(zeros, keys.segments), queries)


def _on_devices(call, queries, keys, given, first):
  """Attention on the mesh in context, or on one device."""
  of_heads = PartitionSpec(call.split.heads or None)
  specs = collections.OrderedDict(
    (pattern, of_heads if len(x) > 1 else PartitionSpec())
    for pattern, x in given.items()
  )
  others = (queries.segments, keys.segments), given, first
  return shard_map.on_any_mesh(
    functools.partial(_on_device, call),
    call.split,
    (queries.q, keys.k, keys.v),
    others,
    (PartitionSpec(*call.split.spec[:2]), specs, PartitionSpec()),
  )


_on_devices_compiled = jax.jit(_on_devices, static_argnums=0)


def _on_device(call, q_BLHK, k_BMGK, v_BMGE, others):
  """Attention of what a device has."""
  (of_queries, of_keys), directions, first = others
  queries, keys = Queries(q_BLHK, of_queries), Keys(k_BMGK, v_BMGE, of_keys)
  axes = call.split.over_positions
  if call.choices[0].executor is dense:
    return dense.attend(
      queries, keys, call.patterns, directions, call.scores, axes, first
    )
  if not axes or not any(pattern.contents() for pattern in call.patterns):
    return _run(call, queries, keys, directions, first)
  # All positions of some heads.
  own, directions = sequence_parallel.own_heads(
    call.patterns, keys.k.shape[2], directions, axes
  )
  call = dataclasses.replace(call, patterns=own, split=shard_map.Split())
  to_heads = functools.partial(exchange.to_heads, axes)
  queries, keys = apply(to_heads, (queries, keys))
  results = _run(call, queries, keys, directions, first)
  return exchange.to_positions(axes, *results)


def _run(call, queries, keys, directions, first):
  """Attention, once what follows the content is found."""
  spans_H, found = selection.prepare(
    call.patterns, queries, keys, directions, call.tile
  )
  return vjp.run_plans(call, queries, keys, spans_H, (found, first))
