"""The parts of docs/evidence.md, and summaries of comparisons.

Comparisons are the comparison.json of `sparse_transformer.compare`, as
`benchmarks.run` stores it; scores by context come from `benchmarks.context`.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.readme import records
from benchmarks.readme.records import origin, wrap
from sparse_transformer import tables
from sparse_transformer.comparison import (
  record as comparison_lib,
  results,
)

# By record: its title.
COMPARISONS = {
  "long_text": "Patterns on text",
  "long_text_steps": "Patterns on text",
  "longer_text": "Patterns on longer text",
  "cifar10_patterns": "Patterns on images",
  "genome_patterns": "Patterns on DNA",
  "content_patterns": "Patterns that follow the content, on text",
  "text_experts": "Number of experts, on text",
  "adamw_rate": "AdamW on text, learning rate",
  "embedding_rate": "Muon on text, learning rate of the embeddings",
}
CONTEXTS = {
  "context": "Context in text",
  "longer_context": "Context in longer text",
  "genome_context": "Context in DNA",
}
# By record of a run that fits on a CPU: its data.
TRAINED = {
  "digits": "8 x 8 digits of scikit-learn",
  "text_small": "the first 6 MB of an English Wikipedia export",
  "text_medium": "the same",
  "cifar10_small": "CIFAR-10",
  "genome": "E. coli K-12",
  "genome_long": "the same",
  "music": "two orchestral pieces",
}
TEXTS, GENOMES = ("text_medium", "text_small"), ("genome_long", "genome")


def read(name: str) -> dict[str, Any]:
  return comparison_lib.read(records.path(name))


def summary(name: str) -> str:
  """The network, budget and scores of a comparison, in a sentence or two."""
  found = read(name)
  about = found["about"]
  ranked = sorted(found["rows"], key=lambda row: row["validation"]["mean"])
  scores = ", ".join(
    f"`{row['choice']}` {records.with_deviation(**row['validation'], digits=2)}"
    for row in ranked
  )
  return (
    f"{_network(found)}, {_size(found)} on {about['machine']}: {scores}"
    f" {about['unit']} of the validation split, mean and standard deviation of"
    f" {about['seeds']} seeds."
  )


def _network(found):
  config = found["about"]["config"]
  model = config["model"]
  sizes = sorted({f"{row['parameters']:,}" for row in found["rows"]})
  return (
    f"{model['num_layers']} layers of width {model['width']},"
    f" {model['num_heads']} heads, {' or '.join(sizes)} parameters, batch"
    f" {config['train']['batch_size']}"
  )


def _size(found):
  """The length of a comparison's sequences, and its budget."""
  batch = found["about"]["config"]["train"]["batch_size"]
  kind, amount = found["about"]["budget"]
  return (
    f"n = {found['runs'][0]['tokens_per_step'] // batch:,}, {amount:,g}"
    f" {kind.replace('_', ' ')} each"
  )


def trained() -> Iterator[str]:
  """Runs of configs that fit on a CPU."""
  runs = {name: records.read(name) for name in TRAINED}
  machines = " or ".join(sorted({run["machine"] for run in runs.values()}))
  titles = "config", "data", "result on the test split", "steps"
  rows = [(*titles, f"time on {machines}")]
  for name, run in runs.items():
    score, *_ = records.test_scores(run)
    digits = 3 if score["unit"] == "bits/base" else 2
    bits = f"{score['bits_per_dim']:.{digits}f} {score['unit']}"
    time = records.time_of(run)
    rows.append((f"`{name}`", TRAINED[name], bits, f"{run['steps']:,}", time))
  yield tables.markdown(rows)


def commands() -> Iterator[str]:
  """The commands of these runs."""
  lines = "\n".join(records.read(name)["command"] for name in TRAINED)
  yield f"```\n{lines}\n```"


def comparisons() -> Iterator[str]:
  """The network, table, figure and origin of each comparison."""
  for name, what in COMPARISONS.items():
    found = read(name)
    about, optimizer = found["about"], found["about"]["config"]["optimizer"]
    yield f"## {what}, {_size(found)}"
    text = f"{_network(found)}, `{optimizer['name']}`"
    if about["field"] != "optimizer.learning_rate":
      text += f" with learning rate {optimizer['learning_rate']:g}"
    yield wrap(f"{text}.")
    yield tables.markdown(results.table(found))
    yield wrap(results.notes(found))
    yield f"![{what}](figures/{name}.png)"
    yield wrap(results.caption(found))
    yield origin(name, about, about["seeds"])


def contexts() -> Iterator[str]:
  """The table, figure and origin of scores with more and less context."""
  for name, title in CONTEXTS.items():
    found = records.read(name)
    unit = found["runs"][0]["unit"]
    digits = records.decimals(unit, 3)
    yield f"## {title}"
    yield wrap(
      f"The same {found['symbols']:,} {records.SYMBOLS[unit]} of the"
      f" {found['split']} split, in {unit}: the first column, and the"
      " difference to it, paired, with its standard error over blocks of"
      f" {found['block']:,}."
    )
    least = [row["min_context"] for row in found["runs"][0]["contexts"]]
    lines = [("run", "n", *(f"at least {x:,} before" for x in least))]
    for run in found["runs"]:
      first, *others = run["contexts"]
      pairs = ((row["difference"], row["difference_error"]) for row in others)
      changes = (records.with_deviation(*x, digits, sign="+") for x in pairs)
      bits = f"{first['bits']:.{digits}f}"
      lines.append((f"`{run['run']}`", f"{run['length']:,}", bits, *changes))
    yield tables.markdown(lines)
    yield f"![bits by minimum context](figures/{name}.png)"
    yield origin(name, found)


def compressors() -> Iterator[str]:
  """General-purpose compressors beside networks."""
  found = records.read("compressors")
  yield wrap(
    f"The test split is the last {found['test_symbols']:,} of"
    f" {found['symbols']:,} bytes."
  )
  fields = "test_given_rest", "test_alone", "all"
  rows = [("bits/byte", "test given the rest", "test alone", "everything")]
  for row in found["rows"]:
    cells = (f"{row[field]:.3f}" for field in fields)
    rows.append((f"`{row['compressor']}`", *cells))
  yield tables.markdown(rows + [(*x, "", "") for x in _scores(TEXTS, 3)])
  yield from _origins("compressors", TEXTS)


def markov() -> Iterator[str]:
  """Markov models of DNA beside networks."""
  found = records.read("markov")
  yield wrap(
    f"Bits/base of the test split, the last {found['symbols']['test']:,} bases"
    " of E. coli K-12; of Markov models, with standard errors over blocks of"
    " consecutive bases."
  )
  columns = {
    ("add", 1): "constant added to counts",
    ("interpolated", 1): "interpolated with lower orders",
    ("interpolated", 2): "interpolated, both strands counted",
  }
  show = "{test:.4f} ± {standard_error:.4f}".format
  cells = {
    (row["order"], row["smoothing"], row["strands"]): show(**row)
    for row in found["rows"]
  }
  orders = sorted({row["order"] for row in found["rows"]})
  rows = [(f"{x}", *(cells[x, *column] for column in columns)) for x in orders]
  yield tables.markdown([("order", *columns.values()), *rows])
  yield tables.markdown([("network", "bits/base"), *_scores(GENOMES, 4)])
  yield from _origins("markov", GENOMES)


def _origins(baseline, runs):
  yield origin(baseline, records.read(baseline))
  for name in runs:
    yield origin(name, records.read(name), seeds=1)


def _scores(names, digits):
  """Runs and their scores of the test split, as cells of a table."""
  for name in names:
    run = records.read(name)
    for score in records.test_scores(run):
      label = (
        f"`{name}`, {run['steps']:,} steps, {records.time_of(run)},"
        f" {run['parameters']:,} parameters"
      )
      if context := score["min_context"]:
        symbols = records.SYMBOLS[score["unit"]]
        label += f"; at least {context:,} {symbols} before each"
      yield label, f"{score['bits_per_dim']:.{digits}f}"
