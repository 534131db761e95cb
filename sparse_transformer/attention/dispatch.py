"""`attend`: the entry point to attention."""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
from jax.sharding import PartitionSpec

from sparse_transformer.attention import (
  arguments,
  contract,
  online_softmax,
  registry,
  sequence_parallel,
  shard_map,
  vjp,
)
from sparse_transformer.attention.content import binding
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
  directions: binding.Directions | None = None,
  backend: str = "auto",
  tile: int = 0,
  spec: PartitionSpec | None = None,
  return_lse: bool = False,
) -> Any:
  """Attention over the pairs of a pattern: softmax(scale q k^T) v.

  B = batch, L = M = n positions, H = heads of queries, G = heads of keys and
  values, K = width of a head's queries and keys, E = width of its values. The
  softmax is in float32 or wider. A query without keys gets output 0, lse -inf
  and zero gradients. The batch axis may be omitted from all arrays.

  On a mesh, each device runs on its own sequences, positions and heads. Devices
  exchange nothing if only sequences and heads are split; if positions are, they
  exchange only what patterns need. Where devices would get different patterns,
  or parts of a key head, each runs all heads.

  Args:
    q_BLHK: queries [batch, n, heads, K], in float16, bfloat16, float32 or, with
      `jax_enable_x64`, float64.
    k_BMGK: keys [batch, n, key heads, K], in the dtype of the queries. G
      divides H: query head h has key head h // (H // G).
    v_BMGE: values [batch, n, key heads, E]. Their dtype may differ.
    patterns: one pattern for all heads, or a tuple or list with one per query
      head, each a `Pattern` or its text, as in "Local(64) | Strided(64)".
    segments_BL: integers [batch, n] that fit in 32 bits, such as document
      numbers, with another one for padding. Traced ones may not have 64 bits.
      Only the pattern's pairs within one segment are used.
      `Strided` and `Block` do not restart at each segment.
    first: position of the first query, when there are fewer queries than keys;
      an integer that may be traced, at most n - L. Segments are of all n keys.
      Not for content-based patterns. Unless `backend` is "dense", plain XLA
      runs these queries, in tiles of its own.
    sinks_H: a logit for each query head, which gets a share of the weights but
      has no value. They get gradients.
    scale: factor of the scores, 1 / sqrt(K) by default; 0, or from 1e-18 to
      1e18 in size.
    softcap: c, where scores s become c tanh(s / c) after scaling, from 1e-18 to
      1e18; 0 for none.
    directions: {pattern: what it is given}. `Routing` requires its centroids;
      `LSH` by default draws random vectors from its seed. Both are [heads,
      directions, K], or with 1 for all heads, and get no gradients.
      `AdaptiveSpan` takes the spans of its heads in positions, [heads] or [1],
      with gradients.
    backend: "auto" runs tile by tile in linear memory, with the executor that
      suits the default device; "dense" is the plain reference with n x n
      memory; any other is the name of an executor.
    tile: positions on a side of a tile; 0 chooses automatically.
    spec: how the mesh in context (`jax.set_mesh`) splits arrays: the axes of
      sequences, of positions and of heads. Within `jax.shard_map`, it is needed
      if positions are split, and the arrays are what a device has. By default,
      explicit axes follow the queries' type; automatic axes split sequences if
      the division is even.
    return_lse: whether to also return the log-sum-exp.

  Returns:
    out_BLHE in the dtype of the values. With `return_lse` also lse_BLH, the
    log-sum-exp of each query's scores in nats, with its sink.

  Raises:
    ValueError: an argument is invalid.
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
  case = contract.make_case(queries.q, keys.v)
  length = case.length * shard_map.num_devices(queries.q, split.within)
  tile = arguments.check_tile(tile, length)
  heads = arguments.patterns_of_heads(patterns, case.num_heads, length)
  scores = arguments.check_scores(scale, softcap)
  others = contract.others_of(
    segments=segments_BL is not None,
    a_soft_cap=scores.softcap,
    sinks=sinks_H is not None,
    a_log_sum_exp=return_lse,
    split_positions=split.over_positions,
    a_symbolic_batch=not isinstance(case.batch, int),
    values_of_another_dtype=queries.q.dtype != keys.v.dtype,
  )
  case = dataclasses.replace(case, length=length, tile=tile)
  case = dataclasses.replace(case, patterns=heads, others=others)
  binding.check_directions(heads, directions or {}, case.qk_width)
  choice = registry.choose(backend, case)
  call = Call(heads, scores, tile, choice, split, others)
  if first is not None:
    _check_slice(call)
  # Unlike those of a dict, its keys need no order to be a pytree.
  given = collections.OrderedDict(directions or {})
  out, lse = _attend(call, case, queries, keys, given, first)
  if sinks_H is not None:
    sinks_H = arguments.check_sinks(sinks_H, case.num_heads)
    out, lse = online_softmax.add_sinks(out, lse, sinks_H)
  if q_BLHK.ndim == 3:
    out, lse = out[0], lse[0]
  return (out, lse) if return_lse else out


def _attend(call, case, *arrays):
  """(out_BLHE, lse_BLH), compiled if nothing else is."""
  shards = shard_map.num_devices(arrays[0].q, call.split.heads)
  own = call.patterns[: case.num_heads // shards]
  if own * shards != call.patterns or case.num_key_heads % shards:
    split = call.split._replace(heads=())  # each device runs all heads
    call = dataclasses.replace(call, split=split)
  else:
    call = dataclasses.replace(call, patterns=own)
  # Loops that are run eagerly would be compiled at each call.
  run = _on_devices_compiled if _are_concrete(arrays) else _on_devices
  return run(call, *arrays)


def _are_concrete(arrays):
  """Whether no program is traced, though derivatives may be."""
  try:
    jax.tree.map(lambda x: jax.extend.core.concrete_or_error(None, x), arrays)
  except jax.errors.ConcretizationTypeError:
    return False
  return True


def _check_slice(call):
  """Raises a ValueError if some queries alone cannot be computed."""
  if found := [p for p in call.patterns if p.contents()]:
    raise ValueError(
      f"{shorten(found[0])} follows the content of all positions, and cannot"
      " run on some of the queries; see `init_cache` and `attend_next`"
    )
  if call.split.over_positions:
    raise ValueError("with first, positions cannot be split over devices")


def _on_devices(call, queries, keys, given, first):
  """Attention on the mesh in context, or on one device."""
  of_heads = PartitionSpec(call.split.heads or None)
  specs = collections.OrderedDict(
    (pattern, of_heads if len(x) > 1 else PartitionSpec())
    for pattern, x in given.items()
  )
  of_others = PartitionSpec(*call.split.spec[:2]), specs, PartitionSpec()
  others = (queries.segments, keys.segments), given, first
  arrays = queries.q, keys.k, keys.v
  run = functools.partial(_on_device, call)
  return shard_map.on_any_mesh(run, call.split, arrays, others, of_others)


_on_devices_compiled = jax.jit(_on_devices, static_argnums=0)


def _on_device(call, q_BLHK, k_BMGK, v_BMGE, others):
  """Attention of what a device has."""
  (of_queries, of_keys), directions, first = others
  queries = contract.Queries(q_BLHK, of_queries)
  keys = contract.Keys(k_BMGK, v_BMGE, of_keys)
  axes = call.split.over_positions
  if call.choice.executor is dense:
    return dense.attend(
      queries, keys, call.patterns, directions, call.scores, axes, first
    )
  over_heads = axes and any(pattern.contents() for pattern in call.patterns)
  if over_heads:  # all positions of some heads
    own, directions = sequence_parallel.own_heads(
      call.patterns, keys.k.shape[2], directions, axes
    )
    call = dataclasses.replace(call, patterns=own, split=shard_map.Split())
    to_heads = functools.partial(sequence_parallel.to_heads, axes)
    queries, keys = apply(to_heads, (queries, keys))
  spans_H, found = binding.prepare(
    call.patterns, queries, keys, directions, call.tile
  )
  results = vjp.run_plans(call, queries, keys, spans_H, (found, first))
  if not over_heads:
    return results
  return sequence_parallel.to_positions(axes, *results)
