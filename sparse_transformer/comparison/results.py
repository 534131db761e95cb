"""A comparison's record as tables and a figure."""

import pathlib

import numpy as np

from sparse_transformer import atomic, patterns, tables
from sparse_transformer.comparison import record as record_lib
from sparse_transformer.comparison.record import Record
from sparse_transformer.figures import style

WIDTH, HEIGHT = 3.4, 3.4  # of a panel, in inches
LETTER = 0.08  # width of one, in inches
MARKERS = "os^Dv<>"  # at the end of a line, as a second way to tell them apart
Table = list[tuple[str, ...]]


def ranking(record: Record) -> Table:
  """The rows of a record as cells of text, below titles of what is known."""
  about, rows = record["about"], record["rows"]
  time = record_lib.time_of(about)
  by_seed = lambda row: ", ".join(f"{x:.4f}" for x in row["values"])
  columns = {
    about["field"]: [row["choice"] for row in rows],
    f"validation, {about['unit']}": [_mean(row["validation"]) for row in rows],
    f"minus {about['choices'][0]}": [_mean(row["gap"], "+") for row in rows],
    "accuracy": [_mean(row["accuracy"]) for row in rows],
    "test": [_mean(row["test"]) for row in rows],
    "by seed": [by_seed(row) for row in rows],
    "keys": [f"{row['keys']:,.1f}" for row in rows],
    "steps": [f"{row['steps']:,.0f}" for row in rows],
    time.replace("_", " "): [f"{row[time]:,.1f}" for row in rows],
    "peak": [f"{x['peak_bytes'] / 2**20:,.0f} MiB" for x in rows],
  }
  known = [(x, *y) for x, y in columns.items() if {*y} != {"-"}]
  return [*zip(*known, strict=True)]


def _mean(value, sign=""):
  if value is None:
    return "-"
  text, error = f"{value['mean']:{sign}.4f}", value["error"]
  return text if error is None else f"{text} ± {error:.4f}"


def notes(record: Record) -> str:
  """Explains the numbers of the table, and the figure."""
  about, best = record["about"], record["rows"][0]
  text, lines = "One seed.", "of one seed"
  if (seeds := about["seeds"]) > 1:
    text = f"Mean of {seeds} seeds ± half of its 95 % confidence interval."
    lines = "the mean of all seeds, in a band from the lowest to the highest"
  number = about["config"]["eval"]["sequences"]
  some = f"the first {number} sequences" if number else "the entire split"
  return (
    f"{text} Validation: the entire split, scored by the best of each run's"
    " checkpoints in float32. Test: scored once, for the best on validation,"
    f" {best['choice']}. Keys: per query, the mean over heads and layers. In"
    f" the figure: validations during training, of {some}; a line is {lines};"
    " its marker is the score of the table."
    f" By `{about['command']}`, commit {about['commit'] or 'unknown'}."
  )


def grid(record: Record) -> tuple[Table, str]:
  """A table of tuning, the best of each choice in brackets; and its note."""
  about, found = record["about"], record["tuning"]
  tuned, candidates = about["tune"]
  cells = [(about["field"], *(f"{tuned}={x}" for x in candidates))]
  for choice, scores in found["scores"].items():
    texts = ["diverged" if x is None else f"{x:.4f}" for x in scores.values()]
    best = candidates.index(found["best"][choice])
    texts[best] = f"[{texts[best]}]"
    cells.append((choice, *texts))
  kind, amount = about["tune_budget"] or about["budget"]
  note = (
    f"Bits on the validation split of one run each of {amount:,g}"
    f" {kind.replace('_', ' ')}, of a seed that is not compared. In brackets:"
    " the best, used for the other runs."
  )
  ends = candidates[0], candidates[-1]
  if edge := [choice for choice, x in found["best"].items() if x in ends]:
    note += f" At the edge, so a value beyond may be better: {', '.join(edge)}."
  return cells, note


def draw_curves(record: Record) -> "style.Figure":
  """Validation bits by time and by steps, up to the score of the table."""
  about, runs = record["about"], record["runs"]
  names = [*map(patterns.shorten, about["choices"])]
  width = 2 * WIDTH + LETTER * (5 + max(map(len, names)))
  figure, panels = style.subplots(1, 2, width, max(HEIGHT, 0.22 * len(names)))
  figure.set_layout_engine("constrained")
  axes = record_lib.time_of(about), "steps"
  scores = {row["choice"]: row["validation"]["mean"] for row in record["rows"]}
  for axis, panel in zip(axes, panels[0], strict=True):
    for i, choice in enumerate(about["choices"]):
      found = record_lib.over_seeds(record_lib.of_choice(runs, choice), axis)
      color = style.COLORS[i % len(style.COLORS)]
      end = dict(marker=MARKERS[i % len(MARKERS)], markevery=[-1], ms=4.5)
      curve = np.c_[found[:2], [found[0][-1], scores[choice]]]
      panel.plot(*curve, color=color, lw=1.6, **end)
      panel.fill_between(found[0], *found[2:], color=color, alpha=0.2, lw=0)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color=style.GRID, lw=0.6)
    panel.set_xlabel(axis.replace("_", " "))
    panel.set_xlim(left=0)
    panel.xaxis.set_major_formatter("{x:,.10g}")
    panel.locator_params(axis="x", nbins=6)
  first, second = panels[0]
  second.sharey(first)
  figure.legend(first.lines, names, loc="outside right upper", frameon=False)
  first.set_ylabel(f"validation, {about['unit']}")
  sizes = {run["tokens_per_step"] for run in runs}
  if len(sizes) == 1:
    second.set_xlabel(f"steps of {sizes.pop():,} tokens")
  return figure


def render(record: Record) -> str:
  """The tables, as Markdown."""
  text = f"{tables.markdown(ranking(record))}\n{notes(record)}\n"
  if record["tuning"]:
    cells, note = grid(record)
    text += f"\n## Tuning\n\n{tables.markdown(cells)}\n{note}\n"
  return text


def write_results(root: pathlib.Path, record: Record) -> None:
  """Writes comparison.json, .md and .png."""
  record_lib.write_record(root / "comparison.json", record)
  atomic.write_text(root / "comparison.md", render(record))
  style.save(draw_curves(record), root / "comparison.png")
