"""The parts of docs/evidence.md, and summaries of comparisons.

Comparisons are the comparison.json of `sparse_transformer.compare`, as
`benchmarks.run` stores it; scores by context come from `benchmarks.context`.
"""

import itertools
import math
import textwrap
from collections.abc import Iterator
from typing import Any

from benchmarks import record
from sparse_transformer import tables
from sparse_transformer.comparison import record as comparison_lib, results

# By record: its title.
COMPARISONS = {
  "cifar10_keys": "Patterns with 31 to 36 keys, on images",
  "cifar10_above": "A window with and without the byte above",
  "cifar10_deep": "Patterns with 17 to 95 keys, on images, 4 layers",
  "cifar10_interleaved": "Layers in turn, on images, 4 layers",
  "repeat": "Copies of a random block",
  "repeat_noise": "Copies of a random block, with noise",
  "recall": "Associative recall",
  "recall_long": "Associative recall over twice the distance",
  "long_text": "Patterns on text",
  "gpt_oss": "The layout of gpt-oss on text",
  "schedule": "From dense to strided after 80 % of the steps",
  "listops": "ListOps of Long Range Arena",
  "image": "Image of Long Range Arena, 8,000 images",
  "strand": "The strand of replication, from scratch and pretrained",
}
# Those before learning rates were tuned for each value.
EARLIER = {
  "cifar10_patterns": "images",
  "genome_patterns": "DNA",
  "long_text_untuned": "text",
  "longer_text": "text",
  "long_text_steps": "text",
  "content_patterns": "text",
  "text_experts": "text",
  "adamw_rate": "text",
  "embedding_rate": "text",
}
CONTEXTS = {
  "context": "Context in text",
  "longer_context": "Context in longer text",
  "genome_context": "Context in DNA",
}
# By record of a run that fits on a CPU: its data.
TRAINED = {
  "digits": "8 x 8 digits of scikit-learn",
  "cifar10_medium": "CIFAR-10",
  "text_medium": "the first 6 MB of an English Wikipedia export",
  "genome_long": "E. coli K-12",
}
# What is counted, by the unit of bits.
SYMBOLS = {"bits/byte": "bytes", "bits/base": "bases", "bits/sample": "samples"}
# What `baselines` takes, by part of the page.
BASELINES = {
  "text": ("bytes", 3, "text_medium", "bytes of an XML dump"),
  "dna": ("fasta", 4, "genome_long", "bases of E. coli K-12"),
  "images": ("cifar10", 3, "cifar10_medium"),
  "listops": ("listops", 3),
  "gray": ("cifar10_gray", 3),
  "strand": ("strand", 3),
}
# What the README has beside a trained run: a record of baselines, and some.
BESIDE = {
  "digits": ("digits", ("independent positions",)),
  "cifar10_medium": ("cifar10", ("`JPEG XL -e 9`", "linear, 12 pixels")),
  "text_medium": ("bytes", ("`PPMd -o16`", "order 6")),
}


def read(name: str) -> dict[str, Any]:
  return comparison_lib.read(record.path(name))


def summary(name: str) -> str:
  """The network, budget and scores of a comparison, in a sentence or two."""
  found = read(name)
  about = found["about"]
  return (
    f"{_network(found)}, {_size(found)} on {about['machine']}:"
    f" {_scores_of(found)}"
    f" {about['unit']} of the validation split, mean of {about['seeds']} seeds"
    " ± half of its 95 % confidence interval."
  )


def _scores_of(found):
  """The values of a comparison, the best first, with their bits."""
  rows, digits = found["rows"], decimals(found["about"]["unit"], 2)
  bits = (with_error(**x["validation"], digits=digits) for x in rows)
  pairs = zip(rows, bits, strict=True)
  return ", ".join(f"`{row['choice']}` {score}" for row, score in pairs)


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
  runs = {name: record.read(name) for name in TRAINED}
  machines = " or ".join(sorted({run["machine"] for run in runs.values()}))
  titles = "config", "data", "result on the test split", "steps"
  rows = [(*titles, f"time on {machines}")]
  for name, run in runs.items():
    score, *_ = record.test_scores(run)
    digits = 3 if score["unit"] == "bits/base" else 2
    bits = f"{score['bits_per_dim']:.{digits}f} {score['unit']}"
    time = record.time_of(run)
    rows.append((f"`{name}`", TRAINED[name], bits, f"{run['steps']:,}", time))
  yield tables.markdown(rows)
  yield from (origin(name, run, seeds=1) for name, run in runs.items())


def beside() -> str:
  """Trained runs beside baselines of the same test splits."""
  rows = [("config", "data", "parameters", "test", "baselines")]
  for name, (data, models) in BESIDE.items():
    run, found = record.read(name), record.read(f"baselines_{data}")
    score, *_ = record.test_scores(run)
    test = {row["model"]: row["test"] for row in found["rows"]}
    others = (f"{model} {test[model]:.3f}" for model in models)
    bits = f"{score['bits_per_dim']:.3f} {score['unit']}"
    parameters = f"{run['parameters']:,}"
    rows.append(
      (f"`{name}`", TRAINED[name], parameters, bits, ", ".join(others))
    )
  return tables.markdown(rows)


def comparisons() -> Iterator[str]:
  """The network, table, figure and origin of each comparison."""
  for name, what in COMPARISONS.items():
    found = read(name)
    about, optimizer = found["about"], found["about"]["config"]["optimizer"]
    yield f"## {what}, {_size(found)}"
    text = f"{_network(found)}, `{optimizer['name']}`"
    if about.get("tune"):
      text += f", {about['tune'][0]} tuned for each"
    elif about["field"] != "optimizer.learning_rate":
      text += f" with learning rate {optimizer['learning_rate']:g}"
    yield wrap(f"{text}.")
    yield tables.markdown(results.table(found))
    yield wrap(results.notes(found))
    yield from _beside(about)
    yield f"![{what}](figures/{name}.png)"
    yield wrap(results.caption(found))
    yield origin(name, about, about["seeds"])


def earlier() -> Iterator[str]:
  """Comparisons in which all values share a learning rate, a row each."""
  titles = "data", "n, budget", "optimizer", "seeds", "validation"
  rows = [(*titles, "record")]
  for name, what in EARLIER.items():
    found = read(name)
    about, optimizer = found["about"], found["about"]["config"]["optimizer"]
    rows.append(
      (
        what,
        _size(found).removesuffix(" each"),
        f"{optimizer['name']}, {optimizer['learning_rate']:g}",
        f"{about['seeds']}",
        f"{about['field']}: {_scores_of(found)} {about['unit']}",
        f"[{about['commit']}](../benchmarks/results/{name}.json)",
      )
    )
  yield tables.markdown(rows)


def repeats() -> Iterator[str]:
  """Comparisons that were repeated with other seeds, and their agreement."""
  found, mean = record.read("repeats"), comparison_lib.mean
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
    texts = (with_error(**x, digits=4, sign=sign) for x in values)
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
  """The table and origin of scores with more and less context."""
  for name, title in CONTEXTS.items():
    found = record.read(name)
    unit = found["runs"][0]["unit"]
    digits = decimals(unit, 3)
    yield f"## {title}"
    yield wrap(
      f"The same {found['symbols']:,} {SYMBOLS[unit]} of the"
      f" {found['split']} split, in {unit}: the first column, and the"
      " difference to it, paired, with its standard error over blocks of"
      f" {found['block']:,}."
    )
    least = [row["min_context"] for row in found["runs"][0]["contexts"]]
    lines = [("run", "n", *(f"at least {x:,} before" for x in least))]
    for run in found["runs"]:
      first, *others = run["contexts"]
      pairs = ((row["difference"], row["difference_error"]) for row in others)
      changes = (with_error(*x, digits, sign="+") for x in pairs)
      bits = f"{first['bits']:.{digits}f}"
      lines.append((f"`{run['run']}`", f"{run['length']:,}", bits, *changes))
    yield tables.markdown(lines)
    yield origin(name, found)


def baselines(
  data: str, digits: int, network: str = "", stream: str = ""
) -> Iterator[str]:
  """Baselines beside a network; `stream` names the symbols of a stream."""
  name, sees = f"baselines_{data}", "can see"
  found = record.read(name)
  if stream:
    symbols, sees = found["symbols"], "sees of what is before"
    yield wrap(
      f"Of {sum(symbols.values()):,} {stream}, the first {symbols['train']:,}"
      f" are the training split, the next {symbols['validation']:,} the"
      f" validation split, and the last {symbols['test']:,} the test split."
      " Standard errors are over blocks of consecutive symbols."
    )
  rows = [(found["unit"], sees, "test", "validation")]
  for row in found["rows"]:
    validation = f"{row['validation']:.{digits}f}"
    test = with_error(row["test"], row.get("standard_error"), digits)
    rows.append((row["model"], row["sees"], test, validation))
  rows += _scores(network, digits) if network else []
  yield tables.markdown(rows)
  yield origin(name, found)


def _beside(about):
  """What baselines score on the same split, if a record is of its data."""
  data, digits = about["config"]["data"], decimals(about["unit"], 2)
  path = record.path(f"baselines_{data['name']}")
  found = record.read(path.stem) if path.exists() else {"data": None}
  about = found["data"] or {"path": None}  # what data are told apart by
  if about == {x: data.get(x) for x in about}:
    accuracy = "accuracy of " * (found["unit"] == "accuracy")
    rows = (f"{x['model']} {x['validation']:.{digits}f}" for x in found["rows"])
    yield wrap(f"No network, the same split: {accuracy}{', '.join(rows)}.")


def _scores(name, digits):
  """The scores of a run on the test split, as rows of a table."""
  run = record.read(name)
  for score in record.test_scores(run):
    label = (
      f"`{name}`, {run['steps']:,} steps, {record.time_of(run)},"
      f" {run['parameters']:,} parameters"
    )
    if context := score["min_context"]:
      label += f"; at least {context:,} {SYMBOLS[score['unit']]} before each"
    yield label, "", f"{score['bits_per_dim']:.{digits}f}", ""


def decimals(unit: str, usual: int) -> int:
  """Decimals of bits: bits per base differ less than others."""
  return 4 if unit == "bits/base" else usual


def with_error(
  mean: float, error: float | None, digits: int, sign: str = ""
) -> str:
  """A mean, and its error if it has one.

  >>> with_error(1.2345, 0.0123, 3, sign="+")
  '+1.234 ± 0.012'
  """
  text = f"{mean:{sign}z.{digits}f}"  # z: no -0.00
  return text if error is None else f"{text} ± {error:.{digits}f}"


def wrap(text: str) -> str:
  """A paragraph, or a point of a list, in lines of at most 100 characters."""
  return textwrap.fill(
    text,
    100,
    subsequent_indent="  " if text.startswith("- ") else "",
    break_long_words=False,
    break_on_hyphens=False,
  )


def origin(name: str, about: dict[str, Any], seeds: int = 0) -> str:
  """The origin of a record: command, seeds if any, machine and commit."""
  of_seeds = f"{seeds} seed{'s' * (seeds > 1)}; " if seeds else ""
  return f"```\n{about['command']}\n```\n\n" + wrap(
    f"[Record](../benchmarks/results/{name}.json): {of_seeds}"
    f"{about['machine']}; commit {about['commit']}."
  )
