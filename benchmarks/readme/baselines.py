"""Baselines next to trained runs: points of the README, and sections."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.readme import records
from benchmarks.readme.text import origin, wrap
from sparse_transformer import tables

# Records of models of the text that is compressed, and of the genome: the first
# that exists is the README's.
TEXTS, GENOMES = ("text_medium", "text_small"), ("genome_long", "genome")


def points() -> Iterator[str]:
  """The points of the README."""
  found = records.read("compressors")
  sizes = ", ".join(
    f"{row['compressor'].split()[0]} {row['test_given_rest']:.2f}"
    for row in found["rows"][:3]
  )
  yield wrap(
    f"- **Text next to compressors.** The last {found['test_symbols']:,} bytes"
    f" of {found['symbols'] / 1e6:.1f} MB of Wikipedia, in bits/byte:"
    f" {reached(TEXTS, 2)}; given all bytes before them, {sizes}."
  )
  found = records.read("markov")
  row = min(found["rows"], key=lambda row: row["validation"])
  yield wrap(
    "- **DNA next to Markov models.** The last"
    f" {found['symbols']['test']:,} bases of E. coli, in bits/base:"
    f" {reached(GENOMES, 3)}; the best Markov model, of order {row['order']},"
    f" {row['test']:.3f}."
  )


def sections() -> Iterator[str]:
  """The paragraphs of docs/evidence.md: tables, origins."""
  found = records.read("compressors")
  yield "## Text next to compressors"
  yield wrap(
    f"The test split is the last {found['test_symbols']:,} of"
    f" {found['symbols']:,} bytes. Given the rest: the size of everything,"
    " minus the size of everything before the test split. The parameters of a"
    " network, which it learned from the training split, are not counted."
  )
  yield tables.markdown(of_text(found["rows"]))
  yield from origins("compressors", TEXTS)
  found = records.read("markov")
  yield "## DNA next to Markov models"
  yield wrap(
    f"Bits/base of the test split, the last {found['symbols']['test']:,} bases"
    " of E. coli K-12; of Markov models, with standard errors over blocks of"
    " consecutive bases. The amount of smoothing is chosen on the validation"
    " split."
  )
  yield tables.markdown(of_genome(found["rows"]))
  yield tables.markdown([("network", "bits/base"), *scores(GENOMES, 4)])
  yield from origins("markov", GENOMES)


def of_text(compressors: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
  """The table of compressors and models of text."""
  fields = "test_given_rest", "test_alone", "all"
  return [
    ("bits/byte", "test given the rest", "test alone", "everything"),
    *(
      (f"`{row['compressor']}`", *(f"{row[x]:.3f}" for x in fields))
      for row in compressors
    ),
    *((*cells, "", "") for cells in scores(TEXTS, 3)),
  ]


def of_genome(markov: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
  """The table of Markov models."""
  cells = {
    (row["order"], row["smoothing"], row["strands"]): (
      f"{row['test']:.4f} ± {row['standard_error']:.4f}"
    )
    for row in markov
  }
  columns = {
    ("add", 1): "constant added to counts",
    ("interpolated", 1): "interpolated with lower orders",
    ("interpolated", 2): "interpolated, both strands counted",
  }
  return [
    ("order", *columns.values()),
    *(
      (f"{order}", *(cells[order, *column] for column in columns))
      for order in sorted({row["order"] for row in markov})
    ),
  ]


def reached(names: Sequence[str], digits: int) -> str:
  """The best score of the first of these runs that has a record."""
  name = next(filter(records.exists, names), names[-1])
  run = records.read(name)
  score = records.test_scores(run)[-1]
  text = f"`{name}` {score['bits_per_dim']:.{digits}f}"
  if context := score["min_context"]:
    unit = records.SYMBOLS[score["unit"]]
    text += f" with at least {context:,} {unit} before each"
  return f"{text} ({about_run(run)})"


def about_run(run: dict[str, Any]) -> str:
  """Steps, time and size of a run."""
  return (
    f"{run['steps']:,} steps, {records.time_of(run)},"
    f" {run['parameters']:,} parameters"
  )


def scores(names: Sequence[str], digits: int) -> Iterator[tuple[str, str]]:
  """Runs and their scores of the test split, as cells of a table."""
  for name in filter(records.exists, names):
    run = records.read(name)
    for score in records.test_scores(run):
      label = f"`{name}`, {about_run(run)}"
      if context := score["min_context"]:
        label += (
          f"; at least {context:,} {records.SYMBOLS[score['unit']]} before each"
        )
      yield label, f"{score['bits_per_dim']:.{digits}f}"


def origins(baseline: str, names: Sequence[str]) -> Iterator[str]:
  """How the record of a baseline, and those of runs, were made."""
  yield origin(baseline, records.read(baseline))
  for name in filter(records.exists, names):
    yield origin(name, records.read(name), seeds=1)
