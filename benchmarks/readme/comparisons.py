"""Comparisons of trained networks: points of the README, and sections.

Their records are the comparison.json of `sparse_transformer.compare`, as
`benchmarks.keep` writes it into benchmarks/results.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.readme import records
from benchmarks.readme.text import origin, wrap
from sparse_transformer import tables
from sparse_transformer.comparison import (
  figures,
  record as comparison_lib,
  results,
)

# By record: what is compared.
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
# Those whose figure is in the README, too.
SHOWN = "long_text", "longer_text", "cifar10_patterns"
SHORT = "test", "steps", "tokens/s", "FLOPs"  # columns of a short table


def points() -> Iterator[str]:
  """A point of the README for each record there is, some with a figure."""
  for name, what in COMPARISONS.items():
    if records.exists(name):
      found = read(name)
      point = wrap(f"- **{title(what, found)}.** {headline(found)}")
      if name in SHOWN:
        point += f"\n\n  ![{what}](docs/figures/{name}.png)"
      yield point


def sections() -> Iterator[str]:
  """The paragraphs of docs/evidence.md: network, table, figure, origin."""
  for name, what in COMPARISONS.items():
    if records.exists(name):
      found = read(name)
      about = found["about"]
      yield f"## {title(what, found)}"
      yield wrap(network(found))
      yield tables.markdown(results.table(found))
      yield wrap(results.notes(found))
      yield f"![{what}](figures/{name}.png)"
      yield wrap(figures.caption(found))
      yield origin(name, about, about["seeds"])


def short_table(name: str) -> str:
  """The most important columns of the table of a comparison."""
  titles, *rows = results.table(read(name))
  kept = [i for i, title in enumerate(titles) if i < 3 or title in SHORT]
  return tables.markdown([[row[i] for i in kept] for row in (titles, *rows)])


def read(name: str) -> dict[str, Any]:
  """The record of a comparison."""
  return comparison_lib.read(records.path(name))


def title(what: str, found: dict[str, Any]) -> str:
  """What is compared, at which length and budget."""
  kind, amount = found["about"]["budget"]
  each = f"{amount:,g} {kind.replace('_', ' ')} each"
  return f"{what}, n = {length(found):,}, {each}"


def length(found: dict[str, Any]) -> int:
  """Symbols in a sequence."""
  batch = found["about"]["config"]["train"]["batch_size"]
  return found["runs"][0]["tokens_per_step"] // batch


def headline(found: dict[str, Any]) -> str:
  """The bits of all choices, the best first, and their differences."""
  about, ranked = found["about"], found["rows"]
  of_seeds, paired = "1 seed", ""
  if about["seeds"] > 1:
    of_seeds = f"mean ± standard deviation of {about['seeds']} seeds"
    paired = ", seed by seed"
  digits = records.decimals(about["unit"])
  scores = listed({row["choice"]: row["validation"] for row in ranked}, digits)
  gaps = {row["choice"]: row["gap"] for row in ranked if row["gap"]}
  unit = about["unit"][0].upper() + about["unit"][1:]
  text = (
    f"{unit} of the validation split, {of_seeds}: {scores}. Difference from"
    f" `{about['choices'][0]}`{paired}: {listed(gaps, digits, '+')}."
  )
  for axis, x in found["equal"].items():
    equal = {row["choice"]: row["equal"][axis] for row in ranked}
    text += (
      f" At {x:,.0f} {comparison_lib.LABELS[axis]}: {listed(equal, digits)}."
    )
  return text


def listed(
  means: dict[str, dict[str, Any]], digits: int, sign: str = ""
) -> str:
  """Choices and their means, the lowest first."""
  ordered = sorted(means.items(), key=lambda item: item[1]["mean"])
  return ", ".join(
    f"`{choice}` {records.with_deviation(mean, digits, sign)}"
    for choice, mean in ordered
  )


def network(found: dict[str, Any]) -> str:
  """The network that is trained, in a sentence."""
  config = found["about"]["config"]
  model, optimizer = config["model"], config["optimizer"]
  sizes = sorted({f"{row['parameters']:,}" for row in found["rows"]})
  text = (
    f"{model['num_layers']} layers of width {model['width']},"
    f" {model['num_heads']} heads, {' or '.join(sizes)} parameters, batch"
    f" {config['train']['batch_size']}, `{optimizer['name']}`"
  )
  if found["about"]["field"] == "optimizer.learning_rate":
    return f"{text}."
  return f"{text} with learning rate {optimizer['learning_rate']:g}."
