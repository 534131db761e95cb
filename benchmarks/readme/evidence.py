"""docs/evidence.md: comparisons, scores by context, baselines, trained runs.

Comparisons are the comparison.json of `sparse_transformer.compare`, as
`benchmarks.run` stores it; scores by context come from `benchmarks.context`.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.readme import records
from benchmarks.readme.records import origin, wrap
from sparse_transformer import tables
from sparse_transformer.comparison import (
  figures,
  record as comparison_lib,
  results,
)

INTRODUCTION = (
  "`make results` makes this page from the records in `benchmarks/results/`; do"
  " not edit it. Fewer bits are better. A comparison trains the same network"
  " with each value of one field of the config, once per seed.",
  "What these results do and do not show:",
)
LIMITS = (
  "No comparison shows that keys from far away help. `local`, which cannot see"
  " past its window in one layer, is ahead of `strided` on text and images, and"
  " level with it on DNA; more context changes bits by a few thousandths.",
  "At n = 4,096 and more, and at these budgets, dense has not begun to learn:"
  " it is little better than counts of pairs of bytes, which score 4.00. With"
  " n = 512 and as many tokens in a step, the same dense network learns as fast"
  " as `local` does here. Differences from dense are about the length of the"
  " window.",
  "Patterns of a comparison do not have equally many keys per query, and share"
  " one learning rate.",
  "Budgets of processor seconds replicate only roughly: steps are timed before"
  " each comparison. The same config and seeds got 4,833 steps in one"
  " comparison below and 4,201 in another, which differ by 0.06 bits.",
  "Rates in tokens/s are wall time on a shared machine.",
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


def page() -> str:
  """All of docs/evidence.md."""
  parts = [
    "# Evidence",
    *map(wrap, INTRODUCTION),
    "\n".join(wrap(f"- {limit}") for limit in LIMITS),
    *_trained(),
    *(part for name in COMPARISONS for part in _comparison(name)),
    *(part for name in CONTEXTS for part in _context(name)),
    *_compressors(),
    *_markov(),
    "[Documentation](README.md)",
  ]
  return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def summary(name: str) -> str:
  """The network, budget and scores of a comparison, in a sentence or two."""
  found = read(name)
  about = found["about"]
  ranked = sorted(found["rows"], key=lambda row: row["validation"]["mean"])
  scores = ", ".join(
    f"`{row['choice']}` {records.with_deviation(**row['validation'], digits=2)}"
    for row in ranked
  )
  kind, amount = about["budget"]
  return (
    f"{_network(found)}, n = {_length(found):,}, {amount:,g}"
    f" {kind.replace('_', ' ')} each on {about['machine']}: {scores}"
    f" {about['unit']} of the validation split, mean and standard deviation of"
    f" {about['seeds']} seeds."
  )


def read(name: str) -> dict[str, Any]:
  """The record of a comparison."""
  return comparison_lib.read(records.path(name))


def _trained():
  """Runs of configs that fit on a CPU, and their commands."""
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
  yield "## Trained networks"
  yield tables.markdown(rows)
  yield wrap(
    "The commands, each followed by `python eval.py --workdir=runs/NAME` (with"
    " `--min_context=0,128` for `text_small`, and `--step=best"
    " --min_context=0,512` for `text_medium`). `python -m benchmarks.run`"
    " stores such a record."
  )
  commands = "\n".join(run["command"] for run in runs.values())
  yield f"```\n{commands}\n```"


def _comparison(name: str) -> Iterator[str]:
  """The network, table, figure and origin of a comparison."""
  found, what = read(name), COMPARISONS[name]
  about = found["about"]
  kind, amount = about["budget"]
  budget = f"{amount:,g} {kind.replace('_', ' ')} each"
  yield f"## {what}, n = {_length(found):,}, {budget}"
  optimizer = about["config"]["optimizer"]
  text = f"{_network(found)}, `{optimizer['name']}`"
  if about["field"] != "optimizer.learning_rate":
    text += f" with learning rate {optimizer['learning_rate']:g}"
  yield wrap(f"{text}.")
  yield tables.markdown(results.table(found))
  yield wrap(results.notes(found))
  yield f"![{what}](figures/{name}.png)"
  yield wrap(figures.caption(found))
  yield origin(name, about, about["seeds"])


def _length(found):
  """Symbols in a sequence."""
  batch = found["about"]["config"]["train"]["batch_size"]
  return found["runs"][0]["tokens_per_step"] // batch


def _network(found):
  """The network that a comparison trains."""
  config = found["about"]["config"]
  model = config["model"]
  sizes = sorted({f"{row['parameters']:,}" for row in found["rows"]})
  return (
    f"{model['num_layers']} layers of width {model['width']},"
    f" {model['num_heads']} heads, {' or '.join(sizes)} parameters, batch"
    f" {config['train']['batch_size']}"
  )


def _context(name: str) -> Iterator[str]:
  """The table, figure and origin of scores with more and less context."""
  found = records.read(name)
  unit = found["runs"][0]["unit"]
  digits = records.decimals(unit, 3)
  yield f"## {CONTEXTS[name]}"
  yield wrap(
    f"The same {found['symbols']:,} {records.SYMBOLS[unit]} of the"
    f" {found['split']} split, in {unit}: the first column, and the difference"
    " to it, paired, with its standard error over blocks of"
    f" {found['block']:,}."
  )
  contexts = [row["min_context"] for row in found["runs"][0]["contexts"]]
  lines = [("run", "n", *(f"at least {x:,} before" for x in contexts))]
  for run in found["runs"]:
    first, *others = run["contexts"]
    changes = (
      records.with_deviation(
        row["difference"], row["difference_error"], digits, sign="+"
      )
      for row in others
    )
    bits = f"{first['bits']:.{digits}f}"
    lines.append((f"`{run['run']}`", f"{run['length']:,}", bits, *changes))
  yield tables.markdown(lines)
  yield f"![bits by minimum context](figures/{name}.png)"
  yield origin(name, found)


def _compressors() -> Iterator[str]:
  """General-purpose compressors beside networks."""
  found = records.read("compressors")
  yield "## Text next to compressors"
  yield wrap(
    f"The test split is the last {found['test_symbols']:,} of"
    f" {found['symbols']:,} bytes. Given the rest: the size of everything,"
    " minus the size of everything before the test split. gzip sees only the"
    " last 32 KB and bzip2 blocks of 900 KB, so neither uses all of the rest."
    " The parameters of a network, which it learned from the training split,"
    " are not counted: in float32, those of `text_medium` take about as many"
    " bytes as the training split."
  )
  yield wrap(
    "These are weak baselines. PPMd (pyppmd, given the training split) scores"
    " 1.859 with order 6 and 1.795 with order 16 on the bytes where"
    " `text_medium` has 1.892; it has no record here yet."
  )
  fields = "test_given_rest", "test_alone", "all"
  rows = [("bits/byte", "test given the rest", "test alone", "everything")]
  for row in found["rows"]:
    cells = (f"{row[field]:.3f}" for field in fields)
    rows.append((f"`{row['compressor']}`", *cells))
  rows += [(*cells, "", "") for cells in _scores(TEXTS, 3)]
  yield tables.markdown(rows)
  for name in ("compressors", *TEXTS):
    yield origin(name, records.read(name), seeds=int(name in TEXTS))


def _markov() -> Iterator[str]:
  """Markov models of DNA beside networks."""
  found = records.read("markov")
  yield "## DNA next to Markov models"
  yield wrap(
    f"Bits/base of the test split, the last {found['symbols']['test']:,} bases"
    " of E. coli K-12; of Markov models, with standard errors over blocks of"
    " consecutive bases. The amount of smoothing is chosen on the validation"
    " split. Higher orders than those of the table are better: 1.927 with order"
    " 14, 1.922 with 24, and 1.905 with a mixture of 1 to 24, measured once and"
    " without a record."
  )
  columns = {
    ("add", 1): "constant added to counts",
    ("interpolated", 1): "interpolated with lower orders",
    ("interpolated", 2): "interpolated, both strands counted",
  }
  cells = {
    (row["order"], row["smoothing"], row["strands"]): (
      f"{row['test']:.4f} ± {row['standard_error']:.4f}"
    )
    for row in found["rows"]
  }
  orders = sorted({row["order"] for row in found["rows"]})
  rows = [(f"{x}", *(cells[x, *column] for column in columns)) for x in orders]
  yield tables.markdown([("order", *columns.values()), *rows])
  yield tables.markdown([("network", "bits/base"), *_scores(GENOMES, 4)])
  for name in ("markov", *GENOMES):
    yield origin(name, records.read(name), seeds=int(name in GENOMES))


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
