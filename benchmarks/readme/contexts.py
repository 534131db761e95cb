"""Scores with more and less context: points of the README, and sections.

Their records are those of `benchmarks.context`.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.readme import records
from benchmarks.readme.text import origin, wrap
from sparse_transformer import tables

# By record: what the scores are of.
CONTEXTS = {
  "context": "Context in text",
  "longer_context": "Context in longer text",
  "genome_context": "Context in DNA",
}


def points() -> Iterator[str]:
  """A point of the README for each record there is."""
  for name, what in CONTEXTS.items():
    if records.exists(name):
      yield wrap(f"- **{what}.** {headline(records.read(name))}")


def sections() -> Iterator[str]:
  """The paragraphs of docs/evidence.md: table, figure, origin."""
  for name, what in CONTEXTS.items():
    if records.exists(name):
      found = records.read(name)
      unit = found["runs"][0]["unit"]
      yield f"## {what}"
      yield wrap(
        f"The same {found['symbols']:,} {records.SYMBOLS[unit]} of the"
        f" {found['split']} split, in {unit}: the first column, and the"
        " difference to it, paired, with its standard error over blocks of"
        f" {found['block']:,}."
      )
      yield tables.markdown(rows(found))
      yield f"![bits by minimum context](figures/{name}.png)"
      yield origin(name, found)


def headline(found: dict[str, Any]) -> str:
  """What the largest minimum context changes, for each run."""
  runs = found["runs"]
  first, last = (runs[0]["contexts"][i]["min_context"] for i in (0, -1))
  unit = runs[0]["unit"]
  symbols = records.SYMBOLS[unit]
  changes = (
    f"`{run['run']}` {change(run['contexts'][-1], unit)}" for run in runs
  )
  return (
    f"With at least {last:,} {symbols} of context instead of {first:,}, the"
    f" {unit} of the same {found['symbols']:,} {symbols} change by:"
    f" {', '.join(changes)}."
  )


def change(row: dict[str, Any], unit: str) -> str:
  """The paired difference in a row, with its error."""
  mean = dict(mean=row["difference"], deviation=row["difference_error"])
  return records.with_deviation(mean, records.decimals(unit, 3), sign="+")


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
  """The table: bits with the first minimum context, and differences to it."""
  contexts = [row["min_context"] for row in found["runs"][0]["contexts"]]
  lines = [("run", "n", *(f"at least {x:,} before" for x in contexts))]
  for run in found["runs"]:
    first, *others = run["contexts"]
    unit = run["unit"]
    cells = (
      f"`{run['run']}`",
      f"{run['length']:,}",
      f"{first['bits']:.{records.decimals(unit, 3)}f}",
    )
    lines.append((*cells, *(change(row, unit) for row in others)))
  return lines
