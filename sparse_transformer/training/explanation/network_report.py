"""What `explain` says about a config: costs, and what positions see.

It reads no data and allocates no network, so it takes seconds at any size.
"""

import collections
import dataclasses
import functools
import itertools
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from sparse_transformer import model as model_lib, tables
from sparse_transformer.attention import cached_group, registry
from sparse_transformer.attention.content import binding
from sparse_transformer.attention.contract import Case
from sparse_transformer.figures.masks import MAX_PANELS, places, save_patterns
from sparse_transformer.model.experts import PER_TOKEN
from sparse_transformer.patterns import Pattern, analysis
from sparse_transformer.training.distributed import mesh
from sparse_transformer.training.explanation import costs

MAX_ROWS = 40  # of the attention table; the JSON has all of them


@dataclasses.dataclass(frozen=True)
class Attention:
  """The costs of the heads that have a pattern, in layers that are equal."""

  pattern: str
  layers: list[int]
  heads: list[int]
  follows_content: bool  # then `pairs` is the most, `keys_min` unknown
  pairs: int  # of one head
  computed: int  # scores, of one head
  keys_min: int | None
  keys_mean: float
  keys_max: int
  executor: str
  tile: list[int]
  cache: int | None  # keys that decoding keeps; None if not causal
  flops: int  # of all these heads in a training step

  @property
  def lanes(self) -> int:
    """Number of these heads."""
    return len(self.layers) * len(self.heads)


@dataclasses.dataclass(frozen=True)
class Holding:
  """The bytes that the keys of equal layers hold, back from a target."""

  layers: list[int]
  runs: list[tuple[int, int]]  # first and last distance, of static pairs
  follows_content: bool  # whether there are others
  above: bool | None  # the byte above, of images; None: content decides


@dataclasses.dataclass(frozen=True)
class Held:
  """`Holding` of all layers; inputs are shifted: key k holds byte k - 1."""

  target: int  # in the middle, of images the last channel of a pixel
  row: int | None  # bytes in a row of an image
  groups: list[Holding]


@dataclasses.dataclass(frozen=True)
class Report:
  """All that is said; `dataclasses.asdict` of it is JSON."""

  network: dict[str, Any]  # its sizes, and numbers of parameters
  attention: list[Attention]
  total: dict[str, Any]  # pairs, scores and FLOPs of all heads
  held: Held | None  # None for a classifier
  reach: analysis.Reach  # by static pairs
  may_see: int | None  # layers, with all pairs that content may choose
  step: dict[str, Any]  # `costs.step`
  mesh: dict[str, int]
  memory: dict[str, int]  # `costs.memory`
  cache: dict[str, int] | None  # for decoding; None if that is impossible
  compiled: dict[str, int] | None = None  # memory of the compiled step
  pictures: Sequence[str] = ()


def describe(config: ConfigDict, model: model_lib.Config) -> Report:
  """The costs and reach of a network in an experiment.

  Raises:
    ValueError: the batch cannot be split evenly.
    Unsupported: the backend cannot run a pattern of this length.
  """
  sizes = mesh.sizes(config)
  mesh.check_batch(config, sizes)
  mesh.check_network(model, sizes)
  attention = describe_attention(config, model)
  names = "task length shape vocab_size num_layers num_heads width dtype remat"
  reach, may_see = find_reach(model)
  return Report(
    network={name: getattr(model, name) for name in names.split()}
    | dict(
      parameters=model_lib.count_parameters(model),
      active_parameters=model_lib.count_active_parameters(model),
      expert_blocks=model_lib.layers_of(model, "expert_blocks"),
      experts=model.experts,
      experts_per_token=PER_TOKEN,
    ),
    attention=attention,
    total=dict(
      pairs=sum(row.pairs * row.lanes for row in attention),
      computed=sum(row.computed * row.lanes for row in attention),
      keys_mean=costs.keys_per_query(model),
      flops=sum(row.flops for row in attention),
    ),
    held=None if model.classifies else find_held(model),
    reach=reach,
    may_see=may_see,
    step=costs.step(config, model, costs.count_pairs(model)),
    mesh=dict(sizes),
    memory=costs.memory(config, model),
    cache=_cache(model, attention),
  )


# Attention.


def describe_attention(
  config: ConfigDict, model: model_lib.Config
) -> list[Attention]:
  """The costs of each distinct pattern in each group of equal layers."""
  case, rows = costs.attention_case(config, model), []
  measure = functools.cache(_measure)
  of_pair = config.train.batch_size * costs.flops_per_pair(model)
  for heads, layers in _groups(model).items():
    static = binding.static_parts(heads)
    tile = registry.common_tile(model.backend, case, static)
    for pattern in dict.fromkeys(heads):
      used_by = [head for head, other in enumerate(heads) if other == pattern]
      found = measure(pattern, case, model.backend, tile)
      flops = found["pairs"] * len(used_by) * len(layers) * of_pair
      rows.append(Attention(layers=layers, heads=used_by, flops=flops, **found))
  return rows


def _groups(model: model_lib.Config) -> dict[tuple[Pattern, ...], list[int]]:
  """The layers that have the same patterns in their heads."""
  groups = collections.defaultdict(list)
  for layer, heads in enumerate(model.patterns):
    groups[heads].append(layer)
  return groups


def _measure(pattern: Pattern, case: Case, backend: str, tile: int) -> dict:
  """The costs of one head with a pattern, in tiles of `tile` unless it is 0."""
  n, follows = case.length, bool(pattern.contents())
  pairs, fewest, cache = analysis.count_pairs(pattern, n), None, None
  if not follows:
    fewest = int(analysis.keys_per_query(pattern, n).min())
  if analysis.is_causal(pattern, n):
    cache = analysis.cache_size(cached_group.kept_pairs(pattern), n)
  tiles = list(_tiles(pattern, case, backend, tile))
  return dict(
    pattern=str(pattern),
    follows_content=follows,
    pairs=pairs,
    computed=sum(scores for *_, scores in tiles),
    keys_min=fewest,
    keys_mean=pairs / n,
    keys_max=analysis.most_keys(pattern, n),
    executor=", ".join(dict.fromkeys(name for name, *_ in tiles)),
    tile=sorted({tile for _, tile, scores in tiles if scores}),
    cache=cache,
  )


def _tiles(pattern, case, backend, tile):
  """(executor, tile, computed scores) of each part that is run."""
  static, others = pattern.split()
  if others and registry.resolve(backend, case) == "dense":
    yield "dense", case.length, case.length**2
    return
  sized = dataclasses.replace(case, tile=case.tile or tile)
  for part in () if static is None else static.parts():
    name, tile, count = registry.tiling(backend, sized, part)
    yield name, tile, tile**2 * count
  if others:
    yield from binding.count_scores(pattern, case)


# What positions see, and decoding.


def find_held(model: model_lib.Config) -> Held:
  """Finds the bytes that keys hold, as distances back from a target."""
  n, target, row = model.length, model.length // 2, None
  if len(model.shape) == 3:
    rows, columns, channels = model.shape
    row = columns * channels
    target = rows // 2 * row + columns // 2 * channels + channels - 1

  def distances(patterns):
    keys = np.concatenate([p.keys(target, n) for p in patterns])
    return np.unique(target + 1 - keys[keys > 0])

  groups = []
  for heads, layers in _groups(model).items():
    static = distances({p.static_part() for p in heads})
    follows = any(p.contents() for p in heads)
    above: bool | None = row in static
    if follows and row is not None and not above:
      support = distances({p.support() for p in heads})
      above = None if row in support else False
    ends = np.flatnonzero(np.diff(static, append=n + 2) > 1)
    starts = np.append(0, ends + 1)[: len(ends)]
    runs = np.stack([static[starts], static[ends]], axis=1).tolist()
    groups.append(Holding(layers, [(a, b) for a, b in runs], follows, above))
  return Held(target, row, groups)


def find_reach(model: model_lib.Config) -> tuple[analysis.Reach, int | None]:
  """Finds after how many layers all positions see what they should, if ever.

  Returns:
    The reach by static pairs; and the layers if content-based patterns had all
    pairs that they may have, None if there are no such patterns.
  """
  layers, n = model.patterns, model.length
  measure = analysis.measure_reach
  static = tuple(tuple(p.static_part() for p in heads) for heads in layers)
  support = tuple(tuple(p.support() for p in heads) for heads in layers)
  may_see = None if support == layers else measure(support, n).layers
  return measure(static, n), may_see


def _cache(model, rows):
  """The cache for decoding a sequence; None if it cannot be decoded."""
  if model.classifies or any(row.cache is None for row in rows):
    return None
  width, value_width = costs.widths(model)
  size = (width + value_width) * costs.itemsize(model)
  keys = sum(row.cache * row.lanes for row in rows)
  every = model.length * model.num_layers * model.num_heads
  labels = sum(
    sum(cached_group.num_labels(pattern, model.length, width))
    for pattern in itertools.chain(*model.patterns)
  )
  total = keys * size + 4 * labels * model.length  # int32
  return dict(keys=keys, bytes=total, full_bytes=every * size)


# Pictures and tables.


def draw(folder: str | os.PathLike, model: model_lib.Config) -> list[str]:
  """Draws the network's patterns, together and one by one; returns paths."""
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  distinct = list(places(model.patterns))
  pictures = {folder / "patterns.png": distinct}
  for i, pattern in enumerate(distinct[:MAX_PANELS]):
    pictures[folder / f"pattern_{i}.png"] = [pattern]
  about = model.patterns, model.shape, model.length
  for path, chosen in pictures.items():
    save_patterns(path, *about, chosen)
  return [str(path) for path in pictures]


COLUMNS = (
  *("pattern", "layers", "heads", "pairs", "keys: min", "mean", "max"),
  *("executor", "tile", "computed / needed", "FLOPs", "cached keys"),
)
NOTE = """
computed / needed: pairs in the computed tiles, divided by those of the pattern;
1 is the best possible."""
EXPECTED = """
~: with as many keys as queries may have; the content may leave fewer.
What is computed, and its time and memory, do not depend on the content. Learned
spans count as the longest: what is computed shrinks with them."""


def render(report: Report) -> str:
  """The report as text."""
  title = (
    "{length:,} positions ({shape}) of {vocab_size} symbols; {num_layers}"
    " layers of {num_heads} heads, width {width}, {dtype};"
    " {parameters:,} parameters"
  )
  if blocks := report.network["expert_blocks"]:
    title += (
      f", {{active_parameters:,}} for each token: blocks {_ranges(blocks)} have"
      " {experts} experts, of which {experts_per_token} for each token"
    )
  shape = " x ".join(map(str, report.network["shape"]))
  rows: list[Sequence[str]] = [*map(_attention_row, report.attention)]
  follows = any(row.follows_content for row in report.attention)
  if (more := len(rows) - MAX_ROWS) > 0:
    rows[MAX_ROWS:] = [(f"and {more} more rows: see --json",)]
  pairs, mean, waste, flops = _amounts("~" * follows, **report.total)
  rows.append(("all", "", "", pairs, "", mean, "", "", "", waste, flops, ""))
  parts = [
    title.format(**report.network | dict(shape=shape)),
    tables.align([COLUMNS, *rows], right_from=3) + NOTE + EXPECTED * follows,
    *([tables.align(_held_rows(report.held))] if report.held else []),
    tables.align([*_reach_rows(report), *_sum_rows(report)]),
  ]
  return "\n\n".join(parts)


def _attention_row(row: Attention) -> Sequence[str]:
  amounts = {x: getattr(row, x) for x in ("pairs", "computed", "keys_mean")}
  about = "~" * row.follows_content
  pairs, mean, waste, flops = _amounts(about, flops=row.flops, **amounts)
  return (
    *(row.pattern, _ranges(row.layers), _ranges(row.heads), pairs),
    "?" if row.keys_min is None else f"{row.keys_min:,}",
    *(mean, f"{row.keys_max:,}", row.executor),
    *(", ".join(map(str, row.tile)), waste, flops),
    "-" if row.cache is None else f"{row.cache:,}",
  )


def _amounts(about, pairs, computed, keys_mean, flops):
  amounts = f"{pairs:,}", f"{keys_mean:,.1f}", f"{computed / max(1, pairs):.2f}"
  return [about + x for x in (*amounts, _flops(flops))]


def _held_rows(held: Held) -> Iterator[Sequence[str]]:
  above = (f"above: t-{held.row}",) if held.row else ()
  yield "layers", f"bytes that keys hold, target t = {held.target:,}", *above
  for group in held.groups[:MAX_ROWS]:
    runs = [
      f"t{-a:+}" if a == b else f"t{-a:+} to t{-b:+}" for a, b in group.runs
    ]
    if len(runs) > 5:
      runs[3:] = [f"{runs[3]} ... {runs[-1]}"]
    others = ["others by content"] * group.follows_content
    what = ", ".join(runs + others) or "none"
    is_above = {True: "yes", None: "by content", False: "no"}[group.above]
    yield _ranges(group.layers), what, *((is_above,) if held.row else ())


def _reach_rows(report: Report) -> Iterator[Sequence[str]]:
  reach, n = report.reach, report.network["length"]
  checked = f"checked: every pair of {reach.positions:,} positions"
  if reach.inputs:
    checked += f", {reach.inputs} inputs to all {n:,}"
  seen = _everything(reach.layers)
  if reach.missing:
    query, key = reach.missing
    seen = "not everything"
    checked = f"query {query:,} never reaches key {key:,}; {checked}"
  yield "sees" if report.may_see is None else "always sees", seen, checked
  if report.may_see is not None:
    what = "if content-based patterns had all pairs they may have"
    yield "may see", _everything(report.may_see), what


def _everything(layers):
  return f"everything after {layers} layer{'s' * (layers != 1)}"


def _sum_rows(report: Report) -> Iterator[Sequence[str]]:
  """(name, value, description) rows on a step and decoding."""
  step, devices = report.step, math.prod(report.mesh.values())
  along = ", ".join(f"{x}={y}" for x, y in report.mesh.items() if y > 1)
  of_one = f"per device of {devices} ({along})" if along else "per device"
  of_step = (
    f"per step: {step['sequences']} sequences, {step['tokens']:,} tokens"
  )
  for title, about, parts, form in (
    ("FLOPs", of_step, step["flops"], _flops),
    ("traffic", "to and from memory, at least", step["bytes"], tables.size),
    ("memory", f"{of_one}, without activations", report.memory, tables.size),
    ("compiled", f"{of_one}, of the whole step", report.compiled, tables.size),
  ):
    if parts:
      yield ("",)
      yield title, form(parts["total"]), about
      yield from ((f"  {x}", form(parts[x])) for x in parts if x != "total")
  yield ("",)
  if report.cache:
    every = tables.size(report.cache["full_bytes"])
    what = f"to decode a sequence; {every} for all keys"
    yield "cache", tables.size(report.cache["bytes"]), what
  else:
    yield "cache", "none", "a label, or queries attend to later keys"


def _ranges(numbers: Sequence[int]) -> str:
  """Abbreviates numbers: all, the first six, or an arithmetic progression.

  >>> _ranges(range(0, 128, 4))
  '0, 4 ... 124'
  """
  distances = {b - a for a, b in itertools.pairwise(numbers)}
  if len(numbers) > 4 and len(distances) == 1:
    return f"{numbers[0]}, {numbers[1]} ... {numbers[-1]}"
  more = " ..." if len(numbers) > 6 else ""
  return ", ".join(map(str, numbers[:6])) + more


def _flops(count: int) -> str:
  units = ("", "k", "M", "G", "T", "P", "E")
  power = min(int(math.log(max(count, 1), 1000)), len(units) - 1)
  return f"{count / 1000**power:,.4g} {units[power]}".strip()
