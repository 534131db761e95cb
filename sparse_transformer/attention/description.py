"""Descriptions of what attention computes, found without running it."""

import dataclasses

from sparse_transformer.attention import cached_group, contract, registry
from sparse_transformer.attention.backends import diagonals
from sparse_transformer.attention.content import binding
from sparse_transformer.attention.heads import group_heads, request_of
from sparse_transformer.patterns import Pattern, analysis


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
  """What the heads with one pattern compute. Counts are for one such head.

  Counts that depend on the content or on a bias are upper bounds.
  """

  pattern: Pattern
  heads: tuple[int, ...]  # indices of the heads with this pattern
  num_key_heads: int  # number of KV heads that these heads use
  pairs: int
  most_keys: int  # the largest number of keys of a query
  computed: int  # scores that are computed
  backends: tuple[str, ...]  # the backends that run the parts of the pattern
  tiles: tuple[int, ...]  # sides of the computed tiles, in positions
  cached_keys: int | None  # keys that decoding keeps; None if not causal


def describe(
  request: contract.Request, backend: str = "auto"
) -> list[Description]:
  """Describes what `attend` would compute for each pattern of a request.

  Args:
    request: the call of `attend`.
    backend: as in `attend`.

  Returns:
    One `Description` for each distinct pattern, in the order of heads.

  Raises:
    ValueError: the backend is unknown.
    Unsupported: the backend cannot run this request.

  >>> from sparse_transformer.patterns import Local
  >>> request = contract.Request(
  ...   patterns=(Local(2), Local(2)), batch=1, length=64, num_key_heads=2,
  ...   qk_width=8, value_width=8, dtype="float32", value_dtype="float32")
  >>> (description,) = describe(request)
  >>> description.heads, description.pairs, description.cached_keys
  ((0, 1), 127, 2)
  """
  by_pattern = group_heads([(pattern,) for pattern in request.patterns])
  return [
    _describe(pattern, heads, request, backend)
    for pattern, heads in by_pattern.items()
  ]


def _describe(pattern, heads, request, backend):
  n = request.length
  tiles = _tiles(pattern, request, backend)

  # Only causal patterns can be decoded step by step.
  cached_keys = None
  if analysis.is_causal(pattern, n):
    cached_keys = cached_group.plan_cache(pattern, n).size

  return Description(
    pattern=pattern,
    heads=heads,
    num_key_heads=request_of(request, pattern, heads).num_key_heads,
    pairs=analysis.count_pairs(pattern, n),
    most_keys=analysis.most_keys(pattern, n),
    computed=sum(scores for _, _, scores in tiles),
    backends=tuple(dict.fromkeys(name for name, _, _ in tiles)),
    tiles=tuple(sorted({tile for _, tile, scores in tiles if scores})),
    cached_keys=cached_keys,
  )


def _tiles(pattern, request, name):
  """Returns (backend, tile, computed scores) for each part of a pattern."""
  n = request.length
  name = registry.resolve(name, request)
  if name == registry.DENSE:
    return [(name, n, n**2)]
  if request.bias:
    tile = diagonals.tile_size(request)
    return [(name, tile, diagonals.most_scores(pattern, request))]

  # A pattern may have static and content-based parts, which different backends
  # run.
  tiles = []
  static, content_parts = pattern.split()
  if static is not None:
    backend = registry.BACKENDS[name]
    # The request keeps the patterns of all heads, because some backends choose
    # one tile for all of them.
    static_patterns = binding.static_parts(request.patterns)
    static_request = dataclasses.replace(request, patterns=static_patterns)
    for part in static.parts():
      tile = backend.tile_size(part, static_request)
      num_tiles = analysis.count_tiles(part, n, tile)
      tiles.append((name, tile, tile**2 * num_tiles))
  if content_parts:
    tiles += binding.count_scores(pattern, request)
  return tiles
