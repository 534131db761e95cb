"""`attend`: the entry point to attention."""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from sparse_transformer.attention import (
  arguments,
  contract,
  online_softmax,
  platforms,
  registry,
  sequence_parallel,
  shard_map,
  vjp,
)
from sparse_transformer.attention.backends import dense
from sparse_transformer.attention.content import binding
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
  bias_HD: jax.Array | None = None,
  scale: float | None = None,
  softcap: float = 0.0,
  directions: binding.Directions | None = None,
  backend: str = "auto",
  tile: int = 0,
  spec: PartitionSpec | None = None,
  return_lse: bool = False,
) -> Any:
  """Computes attention, softmax(scale q k^T) v, over the pairs of patterns.

  Axes: B = batch, L = M = n positions, H = query heads, G = KV heads, K = width
  of a head's queries and keys, E = width of its values. The softmax is computed
  in float32 or wider. A query without keys gets output 0, log-sum-exp -inf and
  zero gradients. The batch axis may be omitted from all arrays.

  On a mesh, each device processes its own sequences, positions and heads. If
  only sequences and heads are split, devices exchange no data. If positions are
  split, devices exchange only the keys that the patterns need. Heads are split
  only if all devices get equal patterns and whole KV heads; otherwise, each
  device computes all heads.

  Args:
    q_BLHK: queries [batch, n, heads, K], in float16, bfloat16, float32 or, with
      `jax_enable_x64`, float64.
    k_BMGK: keys [batch, n, KV heads, K], in the dtype of the queries. G must
      divide H; query head h uses KV head h // (H // G).
    v_BMGE: values [batch, n, KV heads, E]. Their dtype may differ from the
      dtype of the queries and keys.
    patterns: one pattern for all heads, or a tuple or list with one per query
      head, each a `Pattern` or its text, as in "Local(64) | Strided(64)".
    segments_BL: integers [batch, n] that fit in 32 bits, one for each position.
      For packed documents, use the index of the document at each position, and
      a different integer for padding. A query attends only to keys of the same
      segment. Positions are still counted from the start of the sequence, so
      `Strided` and `Block` do not restart at each segment. Traced segments must
      not have a 64-bit dtype.
    first: position of the first query, for calls with fewer queries than keys.
      It is an integer of at most n - L, and may be traced. `segments_BL` must
      still cover all n positions. Content-based patterns do not support
      `first`. Only "dense" and plain XLA support it, so attention falls back to
      plain XLA unless `backend` is "dense".
    sinks_H: a logit for each query head, called a sink. It takes part in the
      softmax like the score of one more key, but has no value. Gradients are
      computed for sinks.
    bias_HD: numbers [heads, distances] that are added to the scores of each
      query head after `softcap`. The second axis contains the distances q - k
      from 1 - n to n - 1. It may be longer if it is extended by the same amount
      on both sides. Gradients are computed for the bias. -inf masks pairs, and
      tiles that are masked entirely are skipped. Content-based patterns do not
      support a bias. Attention falls back to plain XLA, unless `backend` is
      "dense", because no other backend supports it.
    scale: factor of the scores, 1 / sqrt(K) by default. It must be 0, or its
      absolute value must be from 1e-18 to 1e18.
    softcap: a number c from 1e-18 to 1e18. After scaling, scores s are replaced
      by c tanh(s / c). 0 means no soft cap.
    directions: a dict of extra arrays for content-based patterns, keyed by
      pattern. No gradients are computed for them. `Routing` requires its
      centroids; `LSH` draws random vectors from its seed by default. Both have
      shape [heads, directions, K], where the axis of heads may have size 1 if
      all heads share the array. `Selected` requires block indices, int32
      [batch, heads, n, num], where the axis of heads may also have size 1 or G.
    backend: "auto" chooses a backend that suits the default device, and that
      computes attention tile by tile, in memory linear in n. "dense" is
      the plain reference implementation, which needs n x n memory. The other
      backends are "batched", "streamed", "triton", "cudnn" and "mosaic".
    tile: positions on a side of a tile; with 0, the backend chooses.
    spec: how the mesh in context (`jax.set_mesh`) splits arrays: the mesh axes
      that split sequences, positions and heads. Within `jax.shard_map`, arrays
      are the shards of one device, and `spec` is required if positions are
      split. By default, explicit mesh axes split arrays as in the sharding of
      the queries' type. Automatic mesh axes split sequences if they divide the
      batch evenly.
    return_lse: whether to also return the log-sum-exp.

  Returns:
    out_BLHE in the dtype of the values. With `return_lse`, (out_BLHE, lse_BLH),
    where lse_BLH is the log-sum-exp of each query's scores, in nats. It
    includes the sink of the head, if there is one.

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
  batch, _, num_heads, qk_width = queries.q.shape
  _, length, num_key_heads, value_width = keys.v.shape

  split = shard_map.split_of(queries.q, spec)
  # Within `jax.shard_map`, arrays are the shards of one device.
  length *= shard_map.num_devices(queries.q, split.within)
  tile = arguments.check_tile(tile, length)
  request = contract.Request(
    patterns=arguments.patterns_of_heads(patterns, num_heads, length),
    batch=batch if isinstance(batch, int) else None,
    length=length,
    num_key_heads=num_key_heads,
    qk_width=qk_width,
    value_width=value_width,
    dtype=str(queries.q.dtype),
    value_dtype=str(keys.v.dtype),
    platform=platforms.current_platform(),
    tile=tile,
    scores=arguments.check_scores(scale, softcap),
    split=split,
    segments=segments_BL is not None,
    sinks=sinks_H is not None,
    bias=bias_HD is not None,
    lse=return_lse,
  )

  directions = binding.take_directions(
    request.patterns,
    directions,
    batch=batch,
    length=length,
    width=qk_width,
    lacks=0 if q_BLHK.ndim == 3 else (),
  )
  chosen = registry.choose(backend, request)
  if bias_HD is not None:
    bias_HD = arguments.check_bias(
      bias_HD, request.patterns, length, queries.q.dtype
    )
  if first is not None:
    _check_slice(request)

  # Each device gets a request for its own sequences and heads.
  own_request = _of_device(request, queries.q)
  out, lse = _on_devices(
    chosen, own_request, queries, keys, directions, bias_HD, first
  )

  # Sinks are added using only the log-sum-exp, so backends need not support
  # them.
  if sinks_H is not None:
    sinks_H = arguments.check_sinks(sinks_H, num_heads)
    out, lse = online_softmax.add_sinks(out, lse, sinks_H)

  if q_BLHK.ndim == 3:
    out, lse = out[0], lse[0]
  return (out, lse) if return_lse else out


def _check_slice(request):
  """Raises ValueError if a slice of the queries cannot be computed."""
  for pattern in request.patterns:
    if pattern.contents():
      raise ValueError(
        f"{shorten(pattern)} depends on the content of all positions, so first="
        " is not supported; to decode, use `init_cache` and `attend_next`"
      )
  if request.split.over_positions:
    raise ValueError(
      "first= is not supported if positions are split over devices; split"
      " sequences or heads instead"
    )


def _of_device(request, q_BLHK):
  """Returns the request for the sequences and heads of one device.

  All devices run the same program. Heads are therefore split only if the split
  gives all devices the same patterns.
  """
  split = request.split
  num_shards = shard_map.num_devices(q_BLHK, split.heads)
  patterns = request.patterns[: request.num_heads // num_shards]
  is_alike = patterns * num_shards == request.patterns
  if not is_alike or request.num_key_heads % num_shards:
    # Heads cannot be split, so each device runs all of them.
    patterns = request.patterns
    num_shards = 1
    split = split._replace(heads=())

  batch = request.batch
  if batch is not None:
    batch //= shard_map.num_devices(q_BLHK, split.sequences)
  return dataclasses.replace(
    request,
    patterns=patterns,
    batch=batch,
    num_key_heads=request.num_key_heads // num_shards,
    split=split,
  )


# This is jitted so that layers with equal requests are traced and lowered once,
# and so that eager calls do not compile their loops every time.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _on_devices(backend, request, queries, keys, directions, bias_HD, first):
  """Computes (out_BLHE, lse_BLH) on the mesh in context, or on one device."""
  split = request.split
  by_head = PartitionSpec(split.heads or None)
  direction_specs = collections.OrderedDict()
  for pattern, x in directions.items():
    heads = split.heads if np.shape(x)[-3] > 1 else ()
    sequences = split.spec[: np.ndim(x) - 3]
    direction_specs[pattern] = PartitionSpec(*sequences, heads or None)
  return shard_map.on_any_mesh(
    functools.partial(_on_device, backend, request),
    split,
    arrays=(queries.q, keys.k, keys.v),
    rest=((queries.segments, keys.segments), directions, bias_HD, first),
    specs=(
      split._replace(heads=()).spec,
      direction_specs,
      by_head,
      PartitionSpec(),
    ),
  )


def _on_device(backend, request, arrays, rest):
  """Computes (out_BLHE, lse_BLH) from the shards of one device."""
  q_BLHK, k_BMGK, v_BMGE = arrays
  (query_segments, key_segments), directions, bias_HD, first = rest
  queries = contract.Queries(q_BLHK, query_segments)
  keys = contract.Keys(k_BMGK, v_BMGE, key_segments)
  if backend is None:
    return dense.attend(request, queries, keys, directions, bias_HD, first)

  # Content-based patterns compare all positions, and the tiles on a diagonal
  # span all positions. Both need all positions of a head on one device, so
  # heads are split over devices instead of positions.
  axes = request.split.over_positions
  has_content = any(pattern.contents() for pattern in request.patterns)
  over_heads = axes and (has_content or bias_HD is not None)
  if over_heads:
    request, (directions, bias_HD) = sequence_parallel.own_heads(
      request, (directions, bias_HD)
    )
    queries, keys = sequence_parallel.to_heads(axes, (queries, keys))

  # Buckets are found outside the function with custom derivatives: they have no
  # derivatives, and `jax.checkpoint` may then save them.
  runtime_tables = binding.prepare(
    request.patterns, queries, keys, directions, request.tile
  )
  out_BLHE, lse_BLH = vjp.run_plans(
    backend, request, queries, keys, bias_HD, runtime_tables, first
  )
  if over_heads:
    return sequence_parallel.to_positions(axes, (out_BLHE, lse_BLH))
  return out_BLHE, lse_BLH
