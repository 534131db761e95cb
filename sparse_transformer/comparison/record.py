"""The record of a comparison, see docs/compare.md; its tables and figure."""

import json
import math
import pathlib
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import special

from sparse_transformer import atomic, patterns, tables
from sparse_transformer.comparison.plan import Trial
from sparse_transformer.figures import style
from sparse_transformer.training.stopwatch import TIMES

Record = dict[str, Any]
Run = dict[str, Any]
Table = list[tuple[str, ...]]

# The columns of a curve, and the fields of the lines of metrics.
COLUMNS = {"steps": "step"} | {x: x for x in (*TIMES, "bits_per_dim")}
WIDTH, HEIGHT = 3.4, 3.4  # of a panel, in inches
LETTER = 0.08  # width of one, in inches
MARKERS = "os^Dv<>"  # at the end of a line, as a second way to tell them apart


def curve(lines: Iterable[Mapping]) -> Run:
  """The validations in the lines of a run's metrics: {column: values}."""
  lines = [line for line in lines if line["split"] == "validation"]
  return {x: [round(line[y], 5) for line in lines] for x, y in COLUMNS.items()}


def tuning(trials: Iterable[Trial], found: Iterable[dict | None]) -> dict:
  """The part of a record about a grid, from the scores of its runs."""
  scores: dict[str, dict[str, float | None]] = {}
  for trial, score in zip(trials, found, strict=True):
    bits = score["bits_per_dim"] if score else None
    scores.setdefault(trial.choice, {})[trial.candidate] = bits
  best = {}
  for choice, of_choice in scores.items():
    known = [(x, c) for c, x in of_choice.items() if x is not None]
    if not known:
      raise ValueError(
        f"--tune: with {choice}, training diverged with every value of --tune;"
        " give other values"
      )
    best[choice] = min(known)[1]
  return dict(scores=scores, best=best)


def make_record(
  about: Mapping[str, Any], runs: Sequence[Run], grid: dict | None = None
) -> Record:
  """The record of finished runs; `about`, `runs`, `tuning` as described."""
  rows = [_row(about, runs, choice) for choice in about["choices"]]
  rows.sort(key=lambda row: row["validation"]["mean"])
  return dict(about={**about}, tuning=grid, rows=rows, runs=[*runs])


def time_of(about: Mapping[str, Any]) -> str:
  """The clock of the table and the figure: wall-clock only if budgeted."""
  return "seconds" if about["budget"][0] == "seconds" else "processor_seconds"


def of_choice(runs: Sequence[Run], choice: str) -> list[Run]:
  """The runs with a value of the field, by seed."""
  found = [run for run in runs if run["choice"] == choice]
  return sorted(found, key=lambda run: run["seed"])


def _row(about, runs, choice):
  first = about["choices"][0]
  runs, others = of_choice(runs, choice), of_choice(runs, first)
  bits, base = (
    [run["validation"]["bits_per_dim"] for run in x] for x in (runs, others)
  )
  right = [run["validation"].get("accuracy") for run in runs]
  tested = [run["test"]["bits_per_dim"] for run in runs if run["test"]]
  means = "keys", "steps", *TIMES
  return dict(
    choice=choice,
    seeds=len(runs),
    validation=mean(bits),
    values=bits,
    accuracy=mean(right) if None not in right else None,
    gap=mean(bits, base) if choice != first else None,
    test=mean(tested) if tested else None,
    **{x: statistics.fmean(run[x] for run in runs) for x in means},
    peak_bytes=max(run["peak_bytes"] for run in runs),
    parameters=max(run["parameters"] for run in runs),
  )


def mean(
  values: Sequence[float], minus: Sequence[float] = ()
) -> dict[str, Any]:
  """The mean of values minus the mean of others, and its error.

  The error is half of the 95 % confidence interval, from Student's t with the
  degrees of freedom of Welch; None if there is a single value.
  """
  groups = [x for x in (values, minus) if x]
  center = statistics.fmean(values) - (statistics.fmean(minus) if minus else 0)
  if min(map(len, groups)) < 2:
    return dict(mean=center, error=None)
  squares = [statistics.variance(x) / len(x) for x in groups]
  total = sum(squares)
  parts = [x**2 / (len(y) - 1) for x, y in zip(squares, groups, strict=True)]
  freedom = total**2 / sum(parts) if total else 1
  error = math.sqrt(total) * float(special.stdtrit(freedom, 0.975))
  return dict(mean=center, error=error)


def write_record(path: pathlib.Path, record: Record) -> None:
  """Writes a record, its lists of numbers on one line each."""
  text = json.dumps(record, indent=1)
  text = re.sub(r"\[\n[^][{}]*\]", lambda x: re.sub(r"\n *", " ", x[0]), text)
  atomic.write_text(path, text + "\n")


def over_seeds(runs: Sequence[Run], axis: str) -> tuple[np.ndarray, ...]:
  """(x, mean, lowest, highest) of the curves of several seeds.

  x are the points within all curves at which any seed was validated; there,
  the other curves are interpolated linearly.
  """
  names = axis, "bits_per_dim"
  curves = [np.array([run["curve"][x] for x in names], float) for run in runs]
  first = max(x[0] for x, _ in curves)
  last = min(x[-1] for x, _ in curves)
  x = np.unique(np.concatenate([x for x, _ in curves]))
  x = x[(first <= x) & (x <= last)]
  if not len(x):  # single validations, at different times
    x = np.array([last])
  bits = np.stack([np.interp(x, *curve) for curve in curves])
  return x, bits.mean(0), bits.min(0), bits.max(0)


def ranking(record: Record) -> Table:
  """The rows of a record as cells of text, below titles of what is known."""
  about, rows = record["about"], record["rows"]
  time = time_of(about)
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
  axes = time_of(about), "steps"
  scores = {row["choice"]: row["validation"]["mean"] for row in record["rows"]}
  for axis, panel in zip(axes, panels[0], strict=True):
    for i, choice in enumerate(about["choices"]):
      found = over_seeds(of_choice(runs, choice), axis)
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
  write_record(root / "comparison.json", record)
  atomic.write_text(root / "comparison.md", render(record))
  style.save(draw_curves(record), root / "comparison.png")
