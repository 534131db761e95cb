"""Tells what an experiment will cost and see, before it is trained.

python -m sparse_transformer.explain --config=configs/cifar10.py

Prints a table: attention by layers, what positions see through the network,
operations, traffic and memory of a training step, the cache of decoding. With
--json the same as one JSON object. Draws the patterns into --out. No data are
read and no network is made, so that it takes seconds at any size.
"""

import collections
import json
import math
import pathlib

import jax
from absl import flags
from ml_collections import config_flags

from sparse_transformer import cli
from sparse_transformer.attention import (
  batched as parallel,
  streamed as sequential,
)
from sparse_transformer.figures import plots
from sparse_transformer.model import transformer as model_lib
from sparse_transformer.patterns import analysis as structure
from sparse_transformer.training import costs
from sparse_transformer.training.experiment import Experiment

MAX_ROWS = 40  # of the table of attention; all are in the JSON
MAX_LAID_OUT = 2**31  # pairs of a pattern whose tiles are listed one by one
MAX_MASKS = 2**32  # bytes of the masks of the dense backend


def explain(config, model):
  """What the network `model`, a `model.Config`, costs and sees: JSON values.

  config: of the experiment, for its batches and its optimizer.
  """
  _check(config, model)
  attention = explain_attention(config, model)
  total = _total(attention, model)
  return dict(
    positions=model.length,
    shape=list(model.shape),
    vocab_size=model.vocab_size,
    num_layers=model.num_layers,
    num_heads=model.num_heads,
    width=model.width,
    dtype=model.dtype,
    remat=model.remat,
    parameters=model_lib.count_parameters(model),
    attention=attention,
    total=total,
    reach=explain_reach(model),
    step=costs.step(config, model, total["flops"]),
    memory=costs.memory(config, model),
    rematerialisation=costs.rematerialisation(config, model, total["flops"]),
    cache=explain_cache(model, attention),
  )


def _check(config, model):
  batch, micro = config.train.batch_size, config.train.accumulation
  devices = jax.local_device_count()
  if batch < 1 or micro < 1 or batch % (devices * micro):
    raise ValueError(
      f"train.batch_size={batch} must be a multiple of {devices} devices x"
      f" train.accumulation={micro}"
    )
  masks = model.num_heads * model.length**2
  if model.backend == "dense" and masks > MAX_MASKS:
    raise ValueError(
      f"attention.backend=dense needs {_gib(masks)} for its masks of"
      f" {model.length} x {model.length}; use attention.backend=blocked"
    )


# Attention.


def explain_attention(config, model):
  """A dict for each distinct pattern in each group of equal layers."""
  groups = collections.defaultdict(list)
  for layer, heads in enumerate(model.patterns):
    groups[heads].append(layer)
  measured, rows = {}, []
  for heads, layers in groups.items():
    for pattern in dict.fromkeys(heads):
      if pattern not in measured:
        measured[pattern] = _measure(pattern, model)
      mine = [head for head, other in enumerate(heads) if other == pattern]
      pairs = measured[pattern]["pairs"] * len(mine) * len(layers)
      flops = pairs * config.train.batch_size * costs.flops_per_pair(model)
      rows.append(
        dict(layers=layers, heads=mine, **measured[pattern], flops=flops)
      )
  return rows


def _total(attention, model):
  """The rows of `explain_attention` together."""

  def total(field):
    return sum(
      row[field] * len(row["layers"]) * len(row["heads"]) for row in attention
    )

  pairs, computed = total("pairs"), total("computed")
  queries = model.length * model.num_layers * model.num_heads
  return dict(
    pairs=pairs,
    keys_min=min(row["keys_min"] for row in attention),
    keys_mean=pairs / queries,
    keys_max=max(row["keys_max"] for row in attention),
    computed=computed,
    fill=pairs / max(1, computed),
    waste=computed / max(1, pairs),
    flops=sum(row["flops"] for row in attention),
  )


def _measure(pattern, model):
  """Numbers of one head with a pattern."""
  n, keys = model.length, structure.keys_per_query(pattern, model.length)
  pairs = int(keys.sum())
  tiles = [_tiles(part, model) for part in pattern.parts()]
  area = sum(tile**2 * count for tile, count in tiles)
  causal = structure.is_causal(pattern, n)
  return dict(
    pattern=str(pattern),
    pairs=pairs,
    keys_min=int(keys.min()),
    keys_mean=pairs / n,
    keys_max=int(keys.max()),
    tile=sorted({tile for tile, count in tiles if count}),
    computed=area,
    fill=pairs / max(1, area),
    waste=area / max(1, pairs),
    causal=causal,
    cache=structure.cache_size(pattern, n) if causal else None,
  )


def _tiles(part, model):
  """(tile, number of tiles) that one part of a pattern is computed in."""
  n, small = model.length, structure.area(part, model.length) <= MAX_LAID_OUT
  if model.backend == "dense":
    return n, 1
  if model.tile:
    tile = model.tile
  elif jax.default_backend() != "cpu":
    tile = min(parallel.TILE, n)
  elif small:
    tile = sequential.plan(part, n).tile
  else:
    tile = min(max(sequential.TILES), n)
  if small:
    return tile, len(part.layout(n, tile).rows)
  return tile, structure.count_tiles(part, n, tile)


# What positions see.


def explain_reach(model):
  reach = structure.first_complete(model.patterns, model.length)
  return dict(
    layers=reach.layers,
    missing=reach.missing and list(reach.missing),
    positions_checked=reach.positions,
    inputs_checked=reach.inputs,
  )


# Decoding.


def explain_cache(model, attention):
  """Keys and values that decoding one sequence must hold; None: impossible.

  Of a network in which queries attend to later keys no sequence is decoded.
  """
  if not all(row["causal"] for row in attention):
    return None
  size = sum(costs.widths(model)) * costs.itemsize(model)
  keys = sum(r["cache"] * len(r["layers"]) * len(r["heads"]) for r in attention)
  every = model.length * model.num_layers * model.num_heads
  return dict(keys=keys, bytes=keys * size, full_bytes=every * size)


# Pictures and tables.


def draw(folder, model):
  """Draws the network's patterns, in one picture and one by one: the paths."""
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  distinct = list(plots.places(model.patterns))
  pictures = {folder / "patterns.png": distinct}
  for i, pattern in enumerate(distinct[: plots.MAX_PANELS]):
    pictures[folder / f"pattern_{i}.png"] = [pattern]
  for path, chosen in pictures.items():
    plots.save_patterns(path, model.patterns, model.shape, model.length, chosen)
  return [str(path) for path in pictures]


def render(report):
  """The report as text."""
  shape = " x ".join(map(str, report["shape"]))
  lines = [
    f"{report['positions']:,} positions ({shape}) of {report['vocab_size']}"
    f" symbols; {report['num_layers']} layers of {report['num_heads']} heads,"
    f" width {report['width']}, {report['dtype']};"
    f" {report['parameters']:,} parameters",
    "",
    *_attention_table(report),
    "",
    *_table(_summary(report)),
    "",
    *_remat_table(report),
  ]
  return "\n".join(lines)


COLUMNS = "pattern", "layers", "heads", "pairs", "keys: min", "mean", "max"
COLUMNS += "tile", "fill", "waste", "FLOPs", "cache"


def _attention_table(report):
  attention, total = report["attention"], report["total"]
  rows = [COLUMNS]
  for row in attention[:MAX_ROWS]:
    cache = "-" if row["cache"] is None else f"{row['cache']:,}"
    tile = ", ".join(map(str, row["tile"]))
    first = row["pattern"], _ranges(row["layers"]), _ranges(row["heads"])
    rows.append((*first, *_numbers(row, tile), cache))
  more = len(attention) - MAX_ROWS
  if more > 0:
    rows.append((f"and {more} more rows: see --json",))
  layers, heads = report["num_layers"], report["num_heads"]
  rows.append((f"all {layers} x {heads}", "", "", *_numbers(total, ""), ""))
  return _table(rows, numbers_from=3)


def _numbers(row, tile):
  return (
    f"{row['pairs']:,}",
    f"{row['keys_min']:,}",
    f"{row['keys_mean']:,.1f}",
    f"{row['keys_max']:,}",
    tile,
    f"{row['fill']:.0%}",
    f"{row['waste']:.2f}x",
    _flops(row["flops"]),
  )


def _summary(report):
  """(name, value, what it is) of the network, a step and decoding."""
  step, memory, cache = (report[k] for k in ("step", "memory", "cache"))
  flops, moved = step["flops"], step["bytes"]
  yield "sees", _seen(report["reach"]), _checked(report)
  yield "", "", ""
  what = f"of a step: {step['sequences']} sequences, {step['tokens']:,} tokens"
  yield "FLOPs", _flops(flops["total"]), what
  yield "  weights", _flops(flops["weights"]), "of matmuls, exact"
  yield "  attention", _flops(flops["attention"]), "of the pairs, exact"
  what = "in the backward pass, exact"
  yield "  recomputed", _flops(flops["recomputed"]), what
  yield "traffic", _gib(moved["total"]), "of a step, at least"
  yield "  weights", _gib(moved["weights"]), "operands and results of matmuls"
  yield "  attention", _gib(moved["attention"]), "each operand and result once"
  yield "  optimizer", _gib(moved["optimizer"]), "state and gradients"
  yield "", "", ""
  what = f"of a device, {memory['sequences']} sequences at a time; an estimate"
  yield "memory", _gib(memory["total"]), what
  yield "  parameters", _gib(memory["parameters"]), "exact"
  yield "  optimizer", _gib(memory["optimizer"]), "exact"
  yield "  average", _gib(memory["average"]), "of the parameters, exact"
  yield "  gradients", _gib(memory["gradients"]), "and their sum, if summed"
  what = "kept for the backward pass, exact"
  yield "  activations", _gib(memory["activations"]), what
  yield "  copies", _gib(memory["copies"]), "of weights, kept likewise, exact"
  what = "made anew in the backward pass of one"
  yield "  layer", _gib(memory["layer"]), what
  yield "", "", ""
  if cache is None:
    yield "cache", "none", "queries attend to later keys: nothing to decode"
  else:
    what = f"of a sequence; {_gib(cache['full_bytes'])} for all keys"
    yield "cache", _gib(cache["bytes"]), what


def _remat_table(report):
  rows = [("model.remat", "activations", "one layer", "FLOPs recomputed")]
  for remat, way in report["rematerialisation"].items():
    mark = " (chosen)" if remat == report["remat"] else ""
    sizes = _gib(way["activations"]), _gib(way["layer"])
    rows.append((remat + mark, *sizes, _flops(way["recomputed"])))
  return _table(rows, numbers_from=1)


def _seen(reach):
  if reach["missing"]:
    return "not everything"
  plural = "s" if reach["layers"] != 1 else ""
  return f"everything after {reach['layers']} layer{plural}"


def _checked(report):
  reach, n = report["reach"], report["positions"]
  checked = []
  if reach["positions_checked"]:
    checked.append(f"every pair of {reach['positions_checked']:,} positions")
  if reach["inputs_checked"]:
    checked.append(f"{reach['inputs_checked']} inputs to all {n:,}")
  result = f"checked: {', '.join(checked)}"
  if reach["missing"]:
    query, key = reach["missing"]
    result = f"query {query:,} never reaches key {key:,}; {result}"
  return result


def _table(rows, numbers_from=None):
  """Lines with aligned columns; from `numbers_from` on, to the right."""
  rows = list(rows)
  widths = [
    max(len(row[i]) for row in rows if i < len(row) and len(row) > 1)
    for i in range(max(map(len, rows)))
  ]
  lines = []
  for row in rows:
    cells = [
      cell.rjust(width)
      if i >= (numbers_from or len(row))
      else cell.ljust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=False))
    ]
    lines.append("  ".join(cells).rstrip())
  return lines


def _ranges(numbers):
  """'0, 4 ... 124' from numbers at equal distances, else all or the first."""
  if len(numbers) > 4 and len(set(map(int.__sub__, numbers[1:], numbers))) == 1:
    return f"{numbers[0]}, {numbers[1]} ... {numbers[-1]}"
  more = " ..." if len(numbers) > 6 else ""
  return ", ".join(map(str, numbers[:6])) + more


def _gib(size):
  return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _flops(count):
  return _scaled(count, 1000, ("", "k", "M", "G", "T", "P", "E"))


def _scaled(number, base, units):
  power = min(int(math.log(max(number, 1), base)), len(units) - 1)
  return f"{number / base**power:,.4g} {units[power]}".strip()


def main(argv):
  cli.check_arguments(argv)
  args = flags.FLAGS
  config = args.config
  cli.require("config")
  model = Experiment(config).model
  report = explain(config, model)
  name = pathlib.Path(config_flags.get_config_filename(args["config"])).stem
  report["pictures"] = draw(args.out or f"explain/{name}", model)
  if args.json:
    print(json.dumps(report))
  else:
    print(render(report))
    print(f"\npictures in {pathlib.Path(report['pictures'][0]).parent}")


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "Folder of the pictures; explain/<config>.")
  flags.DEFINE_bool("json", False, "Prints one JSON object, not a table.")
  cli.run_on_config(main)
