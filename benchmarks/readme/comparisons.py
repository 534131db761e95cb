"""Comparisons of trained networks: points of the README, and sections.

Their records are the comparison.json of `sparse_transformer.compare`.
"""

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.readme import records
from benchmarks.readme.text import origin, wrap
from sparse_transformer import tables
from sparse_transformer.comparison import (
  curves,
  figures,
  record as comparison_lib,
)

# By record: what is compared.
COMPARISONS = {
  "long_text": "Patterns on text",
  "long_text_steps": "Patterns on text",
  "longer_text": "Patterns on longer text",
  "cifar10_patterns": "Patterns on images",
  "genome_patterns": "Patterns on DNA",
  "optimizer": "Optimizers",
  "embedding_rate": "Muon with other rates of the embeddings",
}
# Those whose figure is in the README, too.
SHOWN = "long_text", "longer_text", "cifar10_patterns"
AMOUNTS = {
  "steps": "{:,.0f} steps each",
  "seconds": "{:,.0f} seconds of training each",
  "processor_seconds": "{:,.0f} processor seconds of training each",
  "flops": "{:.3g} FLOPs of training each",
}
AXES = {
  "steps": "step {:,.0f}",
  "tokens": "{:,.0f} tokens",
  "seconds": "{:,.0f} s",
  "processor_seconds": "{:,.0f} processor s",
}


def points() -> Iterator[str]:
  """A point of the README for each record there is, some with a figure."""
  for name, what in COMPARISONS.items():
    if records.exists(name):
      found = read(name)
      yield wrap(f"- **{title(what, found)}.** {headline(found)}")
      if name in SHOWN:
        yield f"\n  ![{what}](docs/figures/{name}.png)\n"


def sections() -> Iterator[str]:
  """The paragraphs of docs/evidence.md: network, table, figure, origin."""
  for name, what in COMPARISONS.items():
    if records.exists(name):
      found = read(name)
      about = found["about"]
      yield f"## {title(what, found)}"
      yield wrap(headline(found))
      yield wrap(network(found))
      yield tables.markdown(rows(found))
      yield f"![{about['field']}](figures/{name}.png)"
      yield wrap(figures.caption(found))
      yield origin(name, about, about["seeds"])


def read(name: str) -> dict[str, Any]:
  """The record of a comparison; the first row is that of the first choice."""
  records.read(name)
  found = comparison_lib.read(records.path(name))
  order = found["about"]["choices"].index
  found["rows"].sort(key=lambda row: order(row["choice"]))
  return found


def title(what: str, found: dict[str, Any]) -> str:
  """What is compared, at which length and budget."""
  kind, amount = found["about"]["budget"]
  return f"{what}, n = {length(found):,}, {AMOUNTS[kind].format(amount)}"


def length(found: dict[str, Any]) -> int:
  """Symbols in a sequence."""
  batch = found["about"]["config"]["train"]["batch_size"]
  return found["runs"][0]["tokens_per_step"] // batch


def headline(found: dict[str, Any]) -> str:
  """How far the choices are ahead of the first one, also at equal steps."""
  about = found["about"]
  number, kind = about["seeds"], about["unit"]
  text = (
    f"{kind[0].upper()}{kind[1:]} ahead of `{about['choices'][0]}`"
    f" ({number} seed{'s' * (number > 1)}): {listed(ahead(found))}."
  )
  for axis, x in found["equal"].items():
    if x:
      where = AXES[axis].format(x)
      text += f" At {where}: {listed(ahead(found, axis))}."
  return text


def ahead(
  found: dict[str, Any], axis: str | None = None
) -> dict[str, dict[str, float | None]]:
  """By choice, the bits of the first choice minus its own, seed by seed.

  Args:
    found: the record.
    axis: where on the curves, see `equal` in the record; None for the scores of
      the whole validation split.
  """

  def bits(run):
    if axis is None:
      return run["validation"]["bits_per_dim"]
    return curves.at(run, axis, found["equal"][axis])

  first, *others = found["about"]["choices"]
  known = {(run["choice"], run["seed"]): bits(run) for run in found["runs"]}
  of_first = {seed: x for (choice, seed), x in known.items() if choice == first}
  gaps = {
    choice: [x - known[choice, seed] for seed, x in of_first.items()]
    for choice in others
  }
  return {
    choice: dict(
      mean=statistics.fmean(values),
      deviation=statistics.stdev(values) if len(values) > 1 else None,
    )
    for choice, values in gaps.items()
  }


def listed(gaps: dict[str, dict[str, float | None]]) -> str:
  """The choices that are furthest ahead first."""
  ordered = sorted(gaps.items(), key=lambda item: -(item[1]["mean"] or 0))
  return ", ".join(
    f"`{choice}` {records.with_deviation(gap)}" for choice, gap in ordered
  )


def network(found: dict[str, Any]) -> str:
  """The network that is trained, in a sentence."""
  config = found["about"]["config"]
  model, optimizer = config["model"], config["optimizer"]
  sizes = sorted({f"{row['parameters']:,}" for row in found["rows"]})
  return (
    f"{model['num_layers']} layers of width {model['width']},"
    f" {model['num_heads']} heads, {' or '.join(sizes)} parameters, batch"
    f" {config['train']['batch_size']}, learning rate"
    f" {optimizer['learning_rate']:g}"
    + (f" with {optimizer['name']}" if "name" in optimizer else "")
    + "."
  )


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
  """The table of a comparison."""
  about = found["about"]
  equal = {axis: x for axis, x in found["equal"].items() if x}
  lines = [
    (
      f"`{about['field']}`",
      f"validation, {about['unit']}",
      f"ahead of `{about['choices'][0]}`",
      *(f"at {AXES[axis].format(x)}" for axis, x in equal.items()),
      "steps",
      "symbols/s",
      "test",
    )
  ]
  gaps = ahead(found)
  for row in found["rows"]:
    gap, test = gaps.get(row["choice"]), row["test"]
    rate = row["tokens_per_second"]
    lines.append(
      (
        f"`{row['choice']}`",
        records.with_deviation(row["validation"], 3),
        records.with_deviation(gap, 3) if gap else "",
        *(records.with_deviation(row["equal"][axis], 3) for axis in equal),
        f"{row['steps']:,.0f}",
        "" if rate is None else f"{rate:,.0f}",
        records.with_deviation(test, 3) if test else "",
      )
    )
  return lines
