"""What devices send each other in attention, if positions are split."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

from sparse_transformer import model as model_lib
from sparse_transformer.attention import registry
from sparse_transformer.attention.spread import traffic
from sparse_transformer.training import costs, mesh

COLUMNS = (
  "sent along sequence",
  "layers",
  "heads",
  "queries by",
  "keys by",
  "positions",
  "KiB forward",
  "backward",
  "imbalance",
)


def of_network(
  config: ConfigDict, model: model_lib.Config, sizes: mesh.Sizes
) -> list[dict[str, Any]]:
  """The traffic of a device for each part of the patterns, as JSON values.

  Args:
    config: the experiment's config.
    model: the network.
    sizes: the devices along each axis of the mesh.

  Returns:
    One row for each part, of one micro-batch and one layer, with the number of
    `layers` that have it; none if positions are not split, or by an executor
    that gathers them all.
  """
  if sizes["sequence"] == 1:
    return []
  platform = registry.current_platform()
  case = costs.attention_case(config, model, platform)
  executor = registry.EXECUTORS.get(registry.resolve(model.backend, case))
  if executor is None or not hasattr(executor, "shares"):
    return []
  own = model.num_heads // sizes["tensor"]
  case = dataclasses.replace(
    case,
    batch=case.batch // (sizes["data"] * sizes["fsdp"]),
    num_heads=own,
  )
  layers = collections.Counter(heads[:own] for heads in model.patterns)
  return [
    found | dict(layers=number)
    for heads, number in layers.items()
    for found in traffic(executor, heads, case, sizes["sequence"], model.tile)
  ]


def table(found: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
  """Rows of a table, of what `of_network` returns."""
  yield COLUMNS
  for row in found:
    yield (
      row["part"],
      str(row["layers"]),
      str(row["num_heads"]),
      row["queries"],
      row["keys"],
      f"{row['positions']:,.0f}",
      f"{row['forward'] / 1024:,.0f}",
      f"{row['backward'] / 1024:,.0f}",
      f"{row['imbalance']:.2f}",
    )
