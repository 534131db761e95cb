"""The report of `explain`: costs of an experiment, and what positions see.

It reads no data and allocates no network, so it takes seconds at any size.
"""

import collections
import dataclasses
import functools
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from sparse_transformer import model as model_lib, tables
from sparse_transformer.attention import cache_plan, cached_group, registry
from sparse_transformer.attention.content import selection
from sparse_transformer.attention.contract import Case
from sparse_transformer.figures.masks import MAX_PANELS, places, save_patterns
from sparse_transformer.patterns import Pattern, analysis
from sparse_transformer.training.analysis import costs
from sparse_transformer.training.distributed import mesh

MAX_ROWS = 40  # of the attention table; the JSON has all of them

Report = dict[str, Any]


def explain(config: ConfigDict, model: model_lib.Config) -> Report:
  """The costs and reach of a network in an experiment, as JSON values.

  Raises:
    ValueError: the batch cannot be split evenly.
    Unsupported: the backend cannot run a pattern of this length.
  """
  sizes = mesh.sizes(config)
  mesh.check_batch(config, sizes)
  mesh.check_network(model, sizes)
  found = explain_costs(config, model)
  names = "task vocab_size num_layers num_heads width dtype remat".split()
  return dict(
    positions=model.length,
    shape=list(model.shape),
    **{name: getattr(model, name) for name in names},
    parameters=model_lib.count_parameters(model),
    active_parameters=model_lib.count_active_parameters(model),
    experts=_experts(model),
    **found,
    held=None if model.classifies else explain_held(model),
    reach=explain_reach(model),
    mesh=dict(sizes),
    memory=costs.memory(config, model),
    cache=_cache(model, found["attention"]),
  )


def explain_costs(config: ConfigDict, model: model_lib.Config) -> Report:
  """Costs of attention, and of a training step."""
  attention = explain_attention(config, model)
  total = add_up(attention, model)
  return dict(
    attention=attention,
    total=total,
    step=costs.step(config, model, total["pairs"]),
  )


# Attention.


def explain_attention(
  config: ConfigDict, model: model_lib.Config
) -> list[Report]:
  """The costs of each distinct pattern in each group of equal layers."""
  case = costs.attention_case(config, model)
  measure = functools.cache(_measure)
  rows = []
  for heads, layers in _groups(model).items():
    static = selection.static_parts(heads)
    tile = registry.common_tile(model.backend, case, static)
    for pattern in dict.fromkeys(heads):
      measured = measure(pattern, case, model.backend, tile)
      used_by = [head for head, other in enumerate(heads) if other == pattern]
      pairs = measured["pairs"] * len(used_by) * len(layers)
      flops = pairs * config.train.batch_size * costs.flops_per_pair(model)
      rows.append(dict(layers=layers, heads=used_by, **measured, flops=flops))
  return rows


def _groups(model: model_lib.Config) -> dict[tuple[Pattern, ...], list[int]]:
  """The layers that have the same patterns in their heads."""
  groups = collections.defaultdict(list)
  for layer, heads in enumerate(model.patterns):
    groups[heads].append(layer)
  return groups


def add_up(attention: Sequence[Report], model: model_lib.Config) -> Report:
  """All rows of `explain_attention` together."""
  heads = [len(row["layers"]) * len(row["heads"]) for row in attention]
  pairs, computed = (
    sum(row[field] * n for row, n in zip(attention, heads, strict=True))
    for field in ("pairs", "computed")
  )
  fewest = [row["keys_min"] for row in attention]
  return dict(
    follows_content=any(row["follows_content"] for row in attention),
    keys_min=None if None in fewest else min(fewest),
    keys_mean=pairs / (model.length * sum(heads)),
    keys_max=max(row["keys_max"] for row in attention),
    flops=sum(row["flops"] for row in attention),
    **_work(pairs, computed),
  )


def _work(pairs: int, computed: int) -> Report:
  """The scores that are needed and those that are computed."""
  return dict(
    pairs=pairs,
    computed=computed,
    fill=pairs / max(1, computed),
    waste=computed / max(1, pairs),
  )


def _measure(pattern: Pattern, case: Case, backend: str, tile: int) -> Report:
  """The costs of one head with a pattern, in tiles of `tile` unless it is 0.

  If it is content-based, `pairs` is the most, and `keys_min` unknown.
  """
  n, follows = case.length, bool(pattern.contents())
  pairs, kept = analysis.count_pairs(pattern, n), cache_plan.kept_pairs(pattern)
  causal = analysis.is_causal(pattern, n)
  tiles = list(_tiles(pattern, case, backend, tile))
  return dict(
    pattern=str(pattern),
    follows_content=follows,
    executor=", ".join(dict.fromkeys(name for name, *_ in tiles)),
    keys_min=None
    if follows
    else int(analysis.keys_per_query(pattern, n).min()),
    keys_mean=pairs / n,
    keys_max=analysis.most_keys(pattern, n),
    tile=sorted({tile for _, tile, scores in tiles if scores}),
    causal=causal,
    cache=analysis.cache_size(kept, n) if causal else None,
    **_work(pairs, sum(scores for *_, scores in tiles)),
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
    yield from selection.count_scores(pattern, case)


# What positions see, and decoding.


def explain_held(model: model_lib.Config) -> Report:
  """Finds the bytes that keys hold, as distances back from a target.

  Inputs are shifted by one: key k holds byte k - 1.

  Returns:
    `target`, a position in the middle, of images the last channel of a pixel;
    `row`, the bytes in a row of an image, else None; and `groups` of equal
    layers: the runs [first, last] of the distances of static pairs and, for
    images, whether the byte `above` is held, None if content decides that.
  """
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
    static = support = distances({p.static_part() for p in heads})
    follows = any(p.contents() for p in heads)
    if follows:
      support = distances({p.support() for p in heads})
    ends = np.flatnonzero(np.diff(static, append=n + 2) > 1)
    starts = np.append(0, ends + 1)[: len(ends)]
    runs = np.stack([static[starts], static[ends]], axis=1).tolist()
    group = dict(layers=layers, runs=runs, follows_content=follows)
    if row is not None:
      group["above"] = row in static or (None if row in support else False)
    groups.append(group)
  return dict(target=target, row=row, groups=groups)


def explain_reach(model: model_lib.Config) -> Report:
  """Finds after how many layers all positions see what they should, if ever.

  Of a classifier, after how many the pooled positions have seen every input.
  By static pairs only; `may_see` counts all that content-based patterns may
  have, and is None if there are none.
  """
  layers, n = model.patterns, model.length
  measure: Callable[..., analysis.Reach] = analysis.measure_reach
  if model.classifies:
    pooled = range(n) if model.pool == "mean" else [0]
    measure = functools.partial(analysis.pooled_reach, queries=pooled)
  static = tuple(tuple(p.static_part() for p in heads) for heads in layers)
  support = tuple(tuple(p.support() for p in heads) for heads in layers)
  reach = measure(static, n)
  may_see = None
  if support != layers:
    may_see = measure(support, n).layers
  return dict(
    layers=reach.layers,
    missing=reach.missing and list(reach.missing),
    positions_checked=reach.positions,
    inputs_checked=reach.inputs,
    may_see=may_see,
  )


def _experts(model: model_lib.Config) -> Report | None:
  blocks = np.flatnonzero(model.has_experts).tolist()
  numbers = dict(number=model.experts, per_token=model.experts_per_token)
  return dict(blocks=blocks, **numbers) if blocks else None


def _cache(model, attention):
  """The cache for decoding a sequence; None if it cannot be decoded."""
  if model.classifies or any(row["cache"] is None for row in attention):
    return None
  width, value_width = costs.widths(model)
  size = (width + value_width) * costs.itemsize(model)
  keys = sum(r["cache"] * len(r["layers"]) * len(r["heads"]) for r in attention)
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
    save_patterns(path, *about, chosen, first=model.prepends)
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
# What the parts of a step and of its memory are.
FLOPS = dict(
  weights="matmuls with weights",
  attention="pairs of the patterns",
  recomputed="parts of the forward pass, in the backward pass",
)
TRAFFIC = dict(
  weights="operands and results of matmuls",
  attention="operands and results, once each",
  optimizer="state and gradients",
)
MEMORY = dict(
  parameters="",
  optimizer="",
  average="of the parameters",
  gradients="and their sum over micro-batches",
)

COMPILED = dict(arguments="state and batch", temporaries="all else at a time")


def render(report: Report) -> str:
  """The report as text."""
  shape = " x ".join(map(str, report["shape"]))
  title = (
    f"{report['positions']:,} positions ({shape}) of {report['vocab_size']}"
    f" symbols; {report['num_layers']} layers of {report['num_heads']} heads,"
    f" width {report['width']}, {report['dtype']};"
    f" {report['parameters']:,} parameters"
  )
  if experts := report["experts"]:
    title += (
      ", {active_parameters:,} for each token: blocks {blocks} have {number}"
      " experts, of which {per_token} for each token"
    ).format(**report | experts | dict(blocks=_ranges(experts["blocks"])))
  note = NOTE + (EXPECTED if report["total"]["follows_content"] else "")
  parts = [
    title,
    tables.align(_attention_rows(report), right_from=3) + note,
    *([tables.align(_held_rows(report["held"]))] if report["held"] else []),
    tables.align(_summary_rows(report)),
  ]
  return "\n\n".join(parts)


def _attention_rows(report: Report) -> Iterator[Sequence[str]]:
  attention, total = report["attention"], report["total"]
  yield COLUMNS
  for row in attention[:MAX_ROWS]:
    cache = "-" if row["cache"] is None else f"{row['cache']:,}"
    tile = ", ".join(map(str, row["tile"]))
    first = row["pattern"], _ranges(row["layers"]), _ranges(row["heads"])
    yield *first, *_numbers(row, row["executor"], tile), cache
  more = len(attention) - MAX_ROWS
  if more > 0:
    yield (f"and {more} more rows: see --json",)
  layers, heads = report["num_layers"], report["num_heads"]
  yield f"all {layers} x {heads}", "", "", *_numbers(total, "", ""), ""


def _numbers(row: Report, executor: str, tile: str) -> Sequence[str]:
  about = "~" if row["follows_content"] else ""
  fewest = row["keys_min"]
  return (
    f"{about}{row['pairs']:,}",
    "?" if fewest is None else f"{fewest:,}",
    f"{about}{row['keys_mean']:,.1f}",
    f"{row['keys_max']:,}",
    executor,
    tile,
    f"{about}{row['waste']:.2f}",
    about + _flops(row["flops"]),
  )


def _held_rows(held: Report) -> Iterator[Sequence[str]]:
  row = held["row"]
  above = (f"above: t-{row}",) if row else ()
  yield "layers", f"bytes that keys hold, target t = {held['target']:,}", *above
  for group in held["groups"][:MAX_ROWS]:
    runs = [
      f"t{-a:+}" if a == b else f"t{-a:+} to t{-b:+}" for a, b in group["runs"]
    ]
    if len(runs) > 5:
      runs[3:] = [f"{runs[3]} ... {runs[-1]}"]
    others = ["others by content"] * group["follows_content"]
    what = ", ".join(runs + others) or "none"
    is_above = {True: "yes", None: "by content", False: "no"}
    above = (is_above[group["above"]],) if row else ()
    yield _ranges(group["layers"]), what, *above


def _summary_rows(report: Report) -> Iterator[Sequence[str]]:
  """(name, value, description) rows on the network, a step and decoding."""
  step, memory, cache = (report[k] for k in ("step", "memory", "cache"))
  classifies = report["task"] == "classify"
  who = "pooled " * classifies
  yield from _reach_rows(report["reach"], report["positions"], who)
  yield ("",)
  what = f"per step: {step['sequences']} sequences, {step['tokens']:,} tokens"
  yield from _sum_rows("FLOPs", what, step["flops"], _flops, FLOPS)
  what = "to and from memory, at least"
  yield from _sum_rows("traffic", what, step["bytes"], tables.size, TRAFFIC)
  yield ("",)
  mesh = report["mesh"]
  along = [f"{axis}={size}" for axis, size in mesh.items() if size > 1]
  split = f" of {math.prod(mesh.values())} ({', '.join(along)})"
  what = f"per device{split if along else ''}, without activations"
  yield from _sum_rows("memory", what, memory, tables.size, MEMORY)
  if compiled := report.get("compiled"):
    what = "per device, of the step as compiled here"
    yield from _sum_rows("peak", what, compiled, tables.size, COMPILED)
  yield ("",)
  if cache is None:
    why = "cannot decode: queries attend to later keys"
    yield "cache", "none", "predicts a label" if classifies else why
  else:
    what = (
      f"to decode a sequence; {tables.size(cache['full_bytes'])} for all keys"
    )
    yield "cache", tables.size(cache["bytes"]), what


def _sum_rows(title, about, sizes, form, parts):
  """A total and its parts, each with a description."""
  yield title, form(sizes["total"]), about
  for part, what in parts.items():
    yield f"  {part}", form(sizes[part]), what


def _reach_rows(reach: Report, n: int, who: str) -> Iterator[Sequence[str]]:
  def everything(layers):
    return f"everything after {layers} layer{'s' * (layers != 1)}"

  may_see, checked = reach["may_see"], []
  if who:
    checked.append(f"all {n:,} positions, back from the pooled ones")
  elif number := reach["positions_checked"]:
    checked.append(f"every pair of {number:,} positions")
  if number := reach["inputs_checked"]:
    checked.append(f"{number} inputs to all {n:,}")
  seen, what = everything(reach["layers"]), f"checked: {', '.join(checked)}"
  if reach["missing"]:
    query, key = reach["missing"]
    seen = "not everything"
    what = f"query {query:,} never reaches key {key:,}; {what}"
  elif who and not reach["layers"]:
    what = "the mean is over all positions"
  yield who + ("sees" if may_see is None else "always sees"), seen, what
  if may_see is not None:
    what = "if content-based patterns had all pairs they may have"
    yield f"{who}may see", everything(may_see), what


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
