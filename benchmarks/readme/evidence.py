"""The generated parts of docs/evidence.md, and what the README repeats of them.

Comparisons are the comparison.json of `sparse_transformer.compare`, as
`benchmarks.run` stores it. Differences are of means over seeds; every error is
half of a 95 % confidence interval, of Welch's for a difference.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import scipy.stats

from benchmarks import record
from sparse_transformer import patterns, tables

# By record of a run: its data, its pattern, and rows of the record of baselines
# of the same data.
TRAINED = {
  "digits": (
    "8 x 8 digits",
    "strided",
    ("digits", "independent positions"),
  ),
  "cifar10_medium": (
    "CIFAR-10",
    "32 nearby bytes",
    ("cifar10", "`JPEG XL -e 9`", "linear, 12 pixels"),
  ),
  "text_medium": (
    "6 MB of Wikipedia",
    "window of 128",
    ("bytes", "`PPMd -o16`", "`PPMd -o6`", "order 6"),
  ),
}
SPLITS = "test", "validation"
COLUMN, PAPERS = "Local(16) | Strided(96, 1)", "Local(16) | Strided(96)"
ABOVE = "Local(16) | Strided(96, 1) & Local(97)"
# By record: its setting, the column of the target, and the paper's.
COLUMNS = {
  "cifar10_keys": ("2 merged layers, 400 steps", COLUMN, PAPERS),
  "cifar10_deep": ("4 merged layers, 300 steps", COLUMN, PAPERS),
  "cifar10_interleaved": (
    "4 layers in turn, 110 processor seconds",
    "Local(48), Strided(96, 1)",
    "Local(48), Strided(96)",
  ),
}
# By pattern, what it holds of an image.
HOLDS = {
  ABOVE: "16 bytes before the target, and the byte above it",
  "Local(17)": "17 bytes before the target",
  COLUMN: "16 bytes before the target, and all above it",
  "Neighborhood(3, 5, 32)": "2 pixels before, and 3 rows of 5 above",
  "Local(97)": "97 bytes before, of which the last is the byte above",
  "Local(36)": "36 bytes before",
  PAPERS: "16 bytes before, and the column beside the target's",
}
# Accuracy in % as published by Tay et al. 2021, Table 1.
PUBLISHED = {
  "Transformer": 36.37,
  "Sparse Transformer": 17.07,
  "Local attention": 15.82,
  "Longformer": 35.63,
  "BigBird": 36.05,
  "Reformer": 37.27,
}


def interval(values: Sequence[float], than: Sequence[float] = ()) -> str:
  """The mean of some values, or the difference of two means, with its error.

  >>> interval([1.0, 1.1, 0.9]), interval([2.0, 2.1], [1.0, 1.1])
  ('1.000 ± 0.248', '+1.000 ± 0.304')
  """
  mean = sum(values) / len(values)
  if than:
    test = scipy.stats.ttest_ind(values, than, equal_var=False)
    low, high = test.confidence_interval()
    return f"{(low + high) / 2:+.3f} ± {(high - low) / 2:.3f}"
  low, high = scipy.stats.t.interval(
    0.95, len(values) - 1, mean, scipy.stats.sem(values)
  )
  return f"{mean:.3f} ± {high - mean:.3f}"


def values(name: str, choice: str) -> list[float]:
  """Bits of a choice of a comparison on the validation split, by seed."""
  (row,) = (x for x in record.read(name)["rows"] if x["choice"] == choice)
  return row["values"]


def keys(expression: str, n: int = 3072) -> str:
  """Mean keys per query of a pattern."""
  ((pattern,),) = patterns.parse(expression)
  return f"{pattern.pairs(n) / n:.1f}"


def columns() -> Iterator[str]:
  """The column of the target beside the paper's, in three comparisons."""
  titles = "network, budget", "column of the target", "the paper's column"
  rows = [(*titles, "the paper's minus the target's")]
  for name, (setting, ours, papers) in COLUMNS.items():
    found = values(name, ours), values(name, papers)
    rows.append((setting, *map(interval, found), interval(*found[::-1])))
  yield tables.markdown(rows)
  yield from map(origin, COLUMNS)


def one_key() -> Iterator[str]:
  """The byte above the target in place of a key of a window, and more keys."""
  yield _scores("cifar10_above", ABOVE)
  yield _scores("cifar10_deep", ABOVE)
  yield from map(origin, ("cifar10_above", "cifar10_deep"))


def _scores(name, than):
  """All patterns of a comparison of images, the best first."""
  titles = "pattern", "what it holds", "keys", "bits/dim"
  rows = [(*titles, "minus the first")]
  base = values(name, than)
  for row in record.read(name)["rows"]:
    choice, found = row["choice"], row["values"]
    cells = f"`{choice}`", HOLDS[choice], keys(choice), interval(found)
    rows.append((*cells, interval(found, base) if found != base else ""))
  return tables.markdown(rows)


def copies() -> Iterator[str]:
  """Copies of a random block, plain and with noise."""
  rows = [("pattern", "keys", "copies", "noisy copies")]
  for row in record.read("repeat_noise")["rows"]:
    choice = row["choice"]
    found = (interval(values(x, choice)) for x in ("repeat", "repeat_noise"))
    rows.append((f"`{choice}`", f"{row['keys']:.1f}", *found))
  yield tables.markdown(rows)
  yield from map(origin, ("repeat", "repeat_noise"))


def rows_of(name: str) -> dict[str, dict[str, Any]]:
  """{model: its row} of a record of baselines."""
  return {row["model"]: row for row in record.read(name)["rows"]}


def compressors() -> Iterator[str]:
  """Trained networks beside what is known without one, on both splits."""
  rows = [("data", "model", "test", "validation")]
  for name, (data, _, (baselines, *models)) in TRAINED.items():
    run = record.read(name)
    of_run = {
      x["split"]: f"{x['bits_per_dim']:.3f}"
      for x in run["evaluations"]
      if not x["min_context"]
    }
    rows.append((data, f"`{name}`", *(of_run.get(x, "") for x in SPLITS)))
    known = rows_of(f"baselines_{baselines}")
    for model in models:
      found = (f"{known[model][x]:.3f}" for x in SPLITS)
      rows.append(("", model, *found))
  yield tables.markdown(rows)
  for name, (*_, (baselines, *_)) in TRAINED.items():
    yield origin(name)
    yield origin(f"baselines_{baselines}")


def listops() -> Iterator[str]:
  """Published accuracies on ListOps beside those of its first symbol."""
  found = record.read("baselines_listops")
  rows = [("model", "accuracy, %")]
  rows += [(name, f"{x:.2f}") for name, x in PUBLISHED.items()]
  for row in found["rows"]:
    error = 196 * row["standard_error"]
    cell = f"{100 * row['test']:.1f} ± {error:.1f}"
    rows.append((f"{row['model']}, which sees {row['sees']}", cell))
  yield tables.markdown(rows)
  yield origin("baselines_listops")


def texts() -> Iterator[str]:
  """Longer and shorter sequences of text, at equal processor time."""
  found = record.read("gpt_oss")
  rows = [("pattern", "keys", "bits/byte")]
  for row in found["rows"]:
    keys = f"{row['keys']:.0f}"
    rows.append((f"`{row['choice']}`", keys, interval(row["values"])))
  yield tables.markdown(rows)
  yield origin("gpt_oss")


def trained() -> str:
  """Trained networks, what they cost, and what they score."""
  titles = "config", "data", "pattern", "parameters", "trained for"
  rows = [(*titles, "test", "for comparison")]
  for name, (data, pattern, (baselines, *models)) in TRAINED.items():
    run = record.read(name)
    (score, *_) = record.test_scores(run)
    known = rows_of(f"baselines_{baselines}")
    others = (f"{model} {known[model]['test']:.2f}" for model in models)
    bits = f"{score['bits_per_dim']:.2f} {score['unit']}"
    size = f"{run['parameters'] / 1e6:.1f}M"
    about = f"`{name}`", data, pattern, size, record.time_of(run)
    rows.append((*about, bits, ", ".join(others)))
  return tables.markdown(rows)


def origin(name: str) -> str:
  """How a record was made: its command, seeds, machine and commit."""
  found: dict[str, Any] = record.read(name)
  about = found.get("about", found)
  words = [f"{about['seeds']} seeds"] if "seeds" in about else []
  words += [about["machine"], f"commit {about['commit']}"]
  link = f"[Record](../benchmarks/results/{name}.json):"
  return f"{link}\n{'; '.join(words)}.\n\n```\n{about['command']}\n```"
