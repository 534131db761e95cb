"""The parts of docs/evidence.md, and summaries of comparisons.

Comparisons are the comparison.json of `sparse_transformer.compare`, as
`benchmarks.run` stores it; scores by context come from `benchmarks.context`.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from benchmarks.readme import records
from benchmarks.readme.records import origin, wrap
from sparse_transformer import tables
from sparse_transformer.comparison import record as comparison_lib, results

# By record: its title.
COMPARISONS = {
  "cifar10_keys": "Patterns at equal keys, on images",
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
DATA = "path", "fractions"  # what data are told apart by
TEXTS, GENOMES = ("text_medium", "text_small"), ("genome_long", "genome")
IMAGES = ("cifar10_small",)


def read(name: str) -> dict[str, Any]:
  return comparison_lib.read(records.path(name))


def summary(name: str) -> str:
  """The network, budget and scores of a comparison, in a sentence or two."""
  found = read(name)
  about = found["about"]
  ranked = sorted(found["rows"], key=lambda row: row["validation"]["mean"])
  scores = ", ".join(
    f"`{row['choice']}` {records.with_error(**row['validation'], digits=2)}"
    for row in ranked
  )
  return (
    f"{_network(found)}, {_size(found)} on {about['machine']}: {scores}"
    f" {about['unit']} of the validation split, mean of {about['seeds']} seeds"
    " ± half of its 95 % confidence interval."
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
  about = "about " * kind.endswith("seconds")
  return (
    f"n = {found['runs'][0]['tokens_per_step'] // batch:,}, {about}{amount:,g}"
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
    yield from _beside(about)
    yield f"![{what}](figures/{name}.png)"
    yield wrap(results.caption(found))
    yield origin(name, about, about["seeds"])


def repeats() -> Iterator[str]:
  """Comparisons that were repeated with other seeds, and their agreement."""
  found, mean = records.read("repeats"), comparison_lib.mean
  means: dict[tuple[str, str], list[dict]] = {}  # by budget and value
  steps: dict[str, list[int]] = {}
  for one in found:
    kind, amount = one["budget"]
    budget = f"{amount:,g} {kind.replace('_', ' ')}"
    (first, (base, _)), *_ = one["runs"].items()
    for choice, (bits, numbers) in one["runs"].items():
      means.setdefault((budget, f"`{choice}`"), []).append(mean(bits))
      steps.setdefault(budget, []).extend(numbers)
      if choice != first:
        label = f"`{choice}` minus `{first}`"
        means.setdefault((budget, label), []).append(mean(bits, base))
  rows = [("budget", found[0]["unit"], "means of the comparisons", "agree")]
  for (budget, label), values in means.items():
    pairs = [*itertools.combinations(values, 2)]
    number = sum(
      abs(x["mean"] - y["mean"]) <= math.hypot(x["error"], y["error"])
      for x, y in pairs
    )
    sign = "+" if " minus " in label else ""
    texts = (records.with_error(**x, digits=4, sign=sign) for x in values)
    agreeing = f"{number} of {len(pairs)} pairs"
    rows.append((budget, label, ", ".join(texts), agreeing))
  yield tables.markdown(rows)
  for budget, x in steps.items():
    if min(x) < max(x):
      yield wrap(f"Runs of {budget} had {min(x):,} to {max(x):,} steps.")
  yield origin(
    "repeats", found[0], len(next(iter(found[0]["runs"].values()))[0])
  )


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
      changes = (records.with_error(*x, digits, sign="+") for x in pairs)
      bits = f"{first['bits']:.{digits}f}"
      lines.append((f"`{run['run']}`", f"{run['length']:,}", bits, *changes))
    yield tables.markdown(lines)
    yield f"![bits by minimum context](figures/{name}.png)"
    yield origin(name, found)


def text() -> Iterator[str]:
  """Compressors and Markov models beside networks, on text."""
  yield from _stream("baselines_bytes", TEXTS, "bytes of an XML dump", 3)


def dna() -> Iterator[str]:
  """Markov models beside networks, on DNA."""
  yield from _stream("baselines_fasta", GENOMES, "bases of E. coli K-12", 4)


def images() -> Iterator[str]:
  """Codecs and linear prediction beside networks, on images."""
  yield from _baselines("baselines_cifar10", IMAGES, "can see", 3)


def _stream(name, networks, what, digits):
  symbols = records.read(name)["symbols"]
  yield wrap(
    f"Of {sum(symbols.values()):,} {what}, the first {symbols['train']:,} are"
    f" the training split, the next {symbols['validation']:,} the validation"
    f" split, and the last {symbols['test']:,} the test split. Standard errors"
    " are over blocks of consecutive symbols."
  )
  yield from _baselines(name, networks, "sees of what is before", digits)


def _baselines(name, networks, sees, digits):
  found = records.read(name)
  rows = [(found["unit"], sees, "test", "validation")]
  for row in found["rows"]:
    validation = f"{row['validation']:.{digits}f}"
    test = records.with_error(row["test"], row.get("standard_error"), digits)
    rows.append((row["model"], row["sees"], test, validation))
  rows += [(run, "", bits, "") for run, bits in _scores(networks, digits)]
  yield tables.markdown(rows)
  yield origin(name, found)
  yield from (origin(x, records.read(x), seeds=1) for x in networks)


def _beside(about):
  """What baselines score on the same split, if a record is of its data."""
  data, digits = about["config"]["data"], records.decimals(about["unit"], 2)
  path = records.path(f"baselines_{data['name']}")
  found = records.read(path.stem) if path.exists() else {"data": None}
  if found["data"] == {x: data[x] for x in DATA}:
    rows = (f"{x['model']} {x['validation']:.{digits}f}" for x in found["rows"])
    yield wrap(f"No network, the same split: {', '.join(rows)}.")


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
