"""The data that devices exchange in attention, if positions are split."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

from sparse_transformer import model as model_lib
from sparse_transformer.attention import registry
from sparse_transformer.attention.distributed.spread import traffic
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
  """`traffic` for each part of the patterns, of one micro-batch and one layer.

  With the number of `layers` that have it. Empty if positions are not split,
  or if the executor gathers them all.
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
    for found in traffic(executor, heads, case, sizes["sequence"])
  ]


def table(found: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
  """Rows of a table of what `of_network` returns."""
  yield tuple(COLUMNS)
  for row in found:
    kib = row["forward"] / 1024, row["backward"] / 1024
    yield tuple(cell.format(**row, kib=kib) for cell in COLUMNS.values())
