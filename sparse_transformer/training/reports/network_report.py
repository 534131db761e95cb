"""The report of `explain` on a config: costs, and what positions see."""

import collections
import dataclasses
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from sparse_transformer import model as model_lib, schema, tables
from sparse_transformer.attention import (
  Unsupported,
  describe as describe_attention,
  platforms,
  registry,
)
from sparse_transformer.figures.masks import first_few
from sparse_transformer.patterns import analysis
from sparse_transformer.training import costs
from sparse_transformer.training.distributed import mesh
from sparse_transformer.training.reports import receptive_field

# Devices for which the report names a backend, as {name: (platform, compute
# capability of a GPU)}.
DEVICES = {
  "h100": ("cuda", 9.0),
  "a100": ("cuda", 8.0),
  "rtx4090": ("cuda", 8.9),
  "v5e": ("tpu", 0.0),
  "cpu": ("cpu", 0.0),
}


@dataclasses.dataclass(frozen=True)
class Report:
  """The contents of the report. `dataclasses.asdict` converts it to JSON.

  Attributes:
    network: the sizes of the network and its numbers of parameters.
    attention: one row for each pattern in each group of equal layers. A row has
      the fields of `attention.Description`, the pattern as text, and `layers`.
    backends: for each of `DEVICES`, the backend that would run attention there,
      and why.
    reach, may_see: the results of `find_reach`.
    receptive_field: what the last positions can depend on.
    flops: the FLOPs of a training step per token.
    mesh: the number of devices along each axis.
    memory: the bytes of the training state on one device.
    cache: the bytes of keys and values needed to decode a sequence, or None if
      decoding cannot use a cache.
    remat: what the backward pass recomputes, and why.
    compiled: the bytes that the compiled step needs, or None if it was not
      compiled.
  """

  network: dict[str, Any]
  attention: list[dict[str, Any]]
  backends: dict[str, str]
  reach: analysis.Reach
  may_see: int | None
  receptive_field: receptive_field.ReceptiveField
  flops: dict[str, float]
  mesh: dict[str, int]
  memory: dict[str, int]
  cache: int | None
  remat: str
  compiled: dict[str, int] | None = None


def describe(config: schema.Config, model: model_lib.Config) -> Report:
  """Computes the costs and the reach of the network of an experiment.

  Raises ValueError if the mesh does not fit the network or the batch, or if the
  backend cannot run a pattern.
  """
  sizes = mesh.sizes(config)
  mesh.check_batch(config, sizes)
  mesh.check_network(model, sizes)
  attention = list(_attention(config, model))
  reach, may_see = find_reach(model)
  return Report(
    network=dict(
      length=model.length,
      shape=model.shape,
      vocab_size=model.vocab_size,
      num_layers=model.num_layers,
      num_heads=model.num_heads,
      width=model.width,
      dtype=model.dtype,
      parameters=model_lib.count_parameters(model),
      active_parameters=model_lib.count_active_parameters(model),
    ),
    attention=attention,
    backends={x: _choice(config, model, DEVICES[x]) for x in DEVICES},
    reach=reach,
    may_see=may_see,
    receptive_field=receptive_field.measure(model),
    flops=costs.flops_per_token(model),
    mesh=dict(sizes),
    memory=costs.memory(config, model),
    cache=_cache_bytes(model, attention),
    remat=_remat(config.model.remat),
  )


def _remat(remat):
  """Describes what the backward pass recomputes, without compiling a step."""
  text = f"model.remat={remat}"
  if remat != "auto":
    return text
  return (
    f"{text}: the first of {', '.join(schema.REMATS)} that fits; --compile"
    " finds it"
  )


def _attention(config, model):
  """Yields the rows of `Report.attention`."""
  groups = collections.defaultdict(list)
  for layer, heads in enumerate(model.patterns):
    groups[heads].append(layer)

  # There is one request for each group of equal layers, and one description
  # for each pattern of its heads.
  for request in costs.attention_requests(config, model):
    for description in describe_attention(request, model.backend):
      yield vars(description) | dict(
        pattern=str(description.pattern), layers=groups[request.patterns]
      )


def _choice(config, model, device):
  """Returns which backend would run attention on a device, and why.

  The device need not be present.
  """
  with platforms.targeting(*device):
    try:
      requests = costs.attention_requests(config, model)
      return registry.explain_choice(model.backend, *requests)
    except Unsupported as error:
      return str(error)


def find_reach(model: model_lib.Config) -> tuple[analysis.Reach, int | None]:
  """Measures after how many layers positions see all positions before them.

  Returns:
    (reach, may_see). `reach` counts only static pairs, which are always
    present. `may_see` is the number of layers that would suffice if
    content-based patterns chose all pairs that they may choose. It is None if
    no pattern is content-based, or if no number of layers suffices.
  """
  # Content-based patterns choose a subset of their support, which may be empty.
  static = []
  support = []
  for heads in model.patterns:
    static.append([pattern.static_part() for pattern in heads])
    support.append(tuple(pattern.support() for pattern in heads))
  reach = analysis.measure_reach(static, model.length)

  may_see = None
  if support != list(model.patterns):
    may_see = analysis.measure_reach(support, model.length).layers
  return reach, may_see


def _cache_bytes(model, rows):
  """Returns the cache bytes of one sequence; None if no cache is possible."""
  if model.classifies or model.separator is not None:
    return None

  # Query heads that share a KV head also share its cached keys.
  keys = 0
  for row in rows:
    if row["cached_keys"] is None:
      return None
    keys += row["cached_keys"] * len(row["layers"]) * row["num_key_heads"]
  return keys * sum(model.widths) * jnp.dtype(model.dtype).itemsize


COLUMNS = (
  "pattern",
  "layers",
  "heads",
  "pairs",
  "keys: mean",
  "max",
  "backend",
  "tile",
  "computed / needed",
  "cached keys",
)
# Printed below the table of attention.
NOTE = """
computed / needed: pairs in the computed tiles, divided by the pairs of the
pattern; 1 is optimal. For content-based patterns, pairs are the maximum
possible number."""


def render(report: Report) -> str:
  """Returns the report as text."""
  title = (
    "{length:,} positions ({shape}) of {vocab_size} symbols; {num_layers}"
    " layers of {num_heads} heads, width {width}, {dtype};"
    " {parameters:,} parameters"
  )
  if report.network["active_parameters"] < report.network["parameters"]:
    title += ", {active_parameters:,} of which are active for each token"

  shape = " x ".join(map(str, report.network["shape"]))
  parts = [
    title.format(**report.network | dict(shape=shape)),
    tables.align(_attention_rows(report), right_from=3) + NOTE,
    tables.align(list(_reach_rows(report)) + list(_sum_rows(report))),
    tables.align(
      (f"attention on {x}", textwrap.shorten(y, 130, placeholder=" ..."))
      for x, y in report.backends.items()
    ),
  ]
  return "\n\n".join(parts)


def _attention_rows(report: Report) -> Iterator[Sequence[str]]:
  """Yields the rows of the table of attention; the last row sums all heads."""
  yield COLUMNS
  network = report.network
  n = network["length"]
  pairs_of_all = computed_of_all = queries_of_all = 0
  for row in report.attention:
    pairs, mean, waste = _amounts(row["pairs"], row["computed"], n)
    kept = row["cached_keys"]
    yield (
      row["pattern"],
      first_few(row["layers"], network["num_layers"]),
      first_few(row["heads"], network["num_heads"]),
      pairs,
      mean,
      f"{row['most_keys']:,}",
      ", ".join(row["backends"]),
      ", ".join(map(str, row["tiles"])),
      waste,
      "-" if kept is None else f"{kept:,}",
    )
    num_heads = len(row["layers"]) * len(row["heads"])
    pairs_of_all += row["pairs"] * num_heads
    computed_of_all += row["computed"] * num_heads
    queries_of_all += n * num_heads

  pairs, mean, waste = _amounts(pairs_of_all, computed_of_all, queries_of_all)
  yield ("all", "", "", pairs, mean, "", "", "", waste, "")


def _amounts(pairs, computed, queries):
  """Returns as text: pairs, pairs per query, and computed / needed pairs."""
  ratio = computed / max(1, pairs)
  return f"{pairs:,}", f"{pairs / queries:,.1f}", f"{ratio:.2f}"


def _reach_rows(report: Report) -> Iterator[Sequence[str]]:
  """Yields rows about what positions see, and how it was checked."""
  reach = report.reach
  n = report.network["length"]
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
    what = "if content-based patterns chose all pairs that they may choose"
    yield "may see", _everything(report.may_see), what

  field = report.receptive_field
  what = f"maximum over the last {min(n, analysis.LAST)} positions"
  yield "receptive field", f"{field.symbols:,} earlier symbols", what
  for name, seen in field.sees.items():
    yield f"sees {name}", receptive_field.share(seen), "of these positions"


def _everything(layers):
  return f"everything after {layers} layer{'s' * (layers != 1)}"


def _sum_rows(report):
  """Yields rows of FLOPs and bytes, each sum followed by its parts."""
  devices = math.prod(report.mesh.values())
  along = ", ".join(f"{x}={y}" for x, y in report.mesh.items() if y > 1)
  of_one = f"per device of {devices} ({along})" if along else "per device"

  for title, remark, parts, form in (
    ("FLOPs", "per token of a step", report.flops, "{:,.0f}".format),
    ("memory", f"{of_one}, without activations", report.memory, tables.size),
    ("compiled", f"{of_one}, of the whole step", report.compiled, tables.size),
  ):
    if not parts:
      continue
    yield ("",)
    yield title, form(parts["total"]), remark
    for name, amount in parts.items():
      if name != "total":
        yield f"  {name}", form(amount)

  yield "  recomputed", report.remat

  yield ("",)
  if report.cache is None:
    yield (
      "cache",
      "none",
      "impossible with labels, documents, or queries that see later keys",
    )
  else:
    size = tables.size(report.cache)
    yield "cache", size, "keys and values for decoding one sequence"
