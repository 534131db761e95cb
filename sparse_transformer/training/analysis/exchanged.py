"""The data that devices exchange in attention, if positions are split."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from sparse_transformer import model as model_lib
from sparse_transformer.attention import registry
from sparse_transformer.attention.contract import Case, Executor
from sparse_transformer.attention.distributed import spread
from sparse_transformer.patterns import Pattern, shorten
from sparse_transformer.training.analysis import costs
from sparse_transformer.training.distributed import mesh

# {title: a cell of a row}
COLUMNS = {
  "sent along sequence": "{part}",
  "layers": "{layers}",
  "heads": "{num_heads}",
  "queries by": "{queries}",
  "keys by": "{keys}",
  "positions": "{positions:,.0f}",
  "KiB forward": "{kib[0]:,.0f}",
  "backward": "{kib[1]:,.0f}",
  "imbalance": "{imbalance:.2f}",
}


def of_network(
  config: ConfigDict, model: model_lib.Config, sizes: mesh.Sizes
) -> list[dict[str, Any]]:
  """`traffic` of a micro-batch for each part, and how many `layers` have it.

  Empty if positions are not split, or if the executor gathers them all.
  """
  if sizes["sequence"] == 1:
    return []
  case = costs.attention_case(config, model)
  executor = registry.EXECUTORS.get(registry.resolve(model.backend, case))
  if executor is None or not hasattr(executor, "shares"):
    return []
  own = model.num_heads // sizes["tensor"]
  case = dataclasses.replace(
    case, batch=costs.num_sequences(config, sizes), num_heads=own
  )
  layers = collections.Counter(heads[:own] for heads in model.patterns)
  return [
    found | dict(layers=number)
    for heads, number in layers.items()
    for found in traffic(executor, heads, case, sizes["sequence"])
  ]


def traffic(
  executor: Executor,
  patterns: tuple[Pattern, ...],
  case: Case,
  num_devices: int,
) -> list[dict[str, Any]]:
  """The data that a device receives for each part, known before compiling.

  The case has its sequences and heads, but the length of whole sequences.
  """
  item = jnp.dtype(case.dtype).itemsize
  wide, k, e = max(4, item), case.qk_width, case.value_width
  received = spread.received_over_heads(case.length, num_devices)
  over_heads = "all-to-all over heads", received
  content = [pattern for pattern in patterns if pattern.contents()]
  shared = spread.decide(executor, patterns, case, num_devices)
  if content:  # all positions of some heads, whatever the part
    whole = spread.Shares("heads", case.tile)
    shared = iter([(content[0], None, case, whole)])
  rows = []
  for part, _, part_case, shares in shared:
    (queries, num_queries), (keys, num_keys) = (
      over_heads if x is None else (x.kind, x.received)
      for x in (shares.queries, shares.keys)
    )
    if content:  # results are in the dtype of values, and gradients likewise
      forward = backward = num_queries * (2 * (k + e) * item + wide)
    else:
      forward = num_queries * (k * item + (e + 1) * wide)
      forward += num_keys * (k + e) * item
      backward = num_queries * ((k + e) * item + (2 + k) * wide)
      backward += num_keys * (k + e) * (item + wide)
    num_heads, tiles = part_case.num_heads, shares.tiles
    lanes = case.batch * num_heads
    rows.append(
      dict(
        part=shorten(part),
        num_heads=num_heads,  # that have the part
        tile=shares.tile,
        dealing=shares.dealing,  # see `spread.Shares`
        queries=queries,  # how they move: `Route.kind`, or over heads
        keys=keys,
        # Received of each array, in proportion if a device gets some heads.
        positions_of_queries=num_queries,
        positions_of_keys=num_keys,
        positions=2 * (num_queries + num_keys),  # of q, k, v and the output
        # Bytes received in each pass. Results are counted as executors in
        # plain XLA compute them, in float32 or wider.
        forward=round(lanes * forward),
        backward=round(lanes * backward),
        # Tiles of the device with the most, divided by the mean.
        imbalance=float(tiles.max() / tiles.mean()) if len(tiles) else 1.0,
      )
    )
  return rows


def table(found: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
  """Rows of a table of what `of_network` returns."""
  yield tuple(COLUMNS)
  for row in found:
    kib = row["forward"] / 1024, row["backward"] / 1024
    yield tuple(cell.format(**row, kib=kib) for cell in COLUMNS.values())
