"""The record of a comparison, see docs/compare.md; its tables and figure."""

import json
import pathlib
import re
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from sparse_transformer import atomic, patterns, tables
from sparse_transformer.comparison.plan import Trial
from sparse_transformer.figures import curves, style
from sparse_transformer.training.reports.receptive_field import share
from sparse_transformer.training.stopwatch import TIMES

Record = dict[str, Any]
Run = dict[str, Any]
Table = list[tuple[str, ...]]

# The columns of a curve, and the fields of the lines of metrics.
COLUMNS = {"steps": "step"} | {x: x for x in (*TIMES, "bits_per_dim")}
# The side of a panel, in inches.
PANEL = 3.4
# The width of a letter of the legend, in inches.
LETTER = 0.08
# Markers at the ends of lines, as a second way to tell lines apart: one more
# than colors, so that the eighth line differs from the first.
MARKERS = "os^Dv<>P"


def curve(lines: Iterable[Mapping]) -> Run:
  """The validations of a run, from the lines of its metrics.

  Returns:
    {column: values} for the columns of `COLUMNS`, with at most 5 decimals,
    which keeps comparison.json small.
  """
  values = curves.series(lines, "validation", COLUMNS.values())
  return {x: [round(y, 5) for y in values[COLUMNS[x]]] for x in COLUMNS}


def tuning(trials: Iterable[Trial], scores: Iterable[Run | None]) -> Run:
  """The part of a record about tuning, from the scores of its runs.

  Args:
    trials: the runs of tuning.
    scores: their numbers, see `trials.scored`, in the same order; None where
      training diverged.

  Returns:
    `scores`, the bits by choice and candidate, None if training diverged;
    `best`, the candidate of each choice.

  Raises:
    ValueError: training diverged with every candidate of a choice.
  """
  table: dict[str, dict[str, float | None]] = {}
  for trial, score in zip(trials, scores, strict=True):
    bits = score["bits_per_dim"] if score else None
    table.setdefault(trial.choice, {})[trial.candidate] = bits

  best = {}
  for choice, row in table.items():
    finite = [(bits, x) for x, bits in row.items() if bits is not None]
    if not finite:
      raise ValueError(
        f"--tune: with {choice}, training diverged with every value of --tune;"
        " give other values"
      )
    # Of candidates with equal bits, the text decides, the same in every call.
    _, best[choice] = min(finite)
  return dict(scores=table, best=best)


def make_record(
  provenance: Mapping[str, Any],
  runs: Sequence[Run],
  tuned: Run | None = None,
) -> Record:
  """Makes the record of finished runs, whose rows begin with the best choice.

  Args:
    provenance: what the comparison is, see `Comparison.about`, and how it was
      made: its unit, commit, versions and command.
    runs: see `trials.collected`.
    tuned: see `tuning`; None without tuning.
  """
  # Gaps are to the first choice on the command line, the baseline of its user.
  choices = [of_choice(runs, choice) for choice in provenance["choices"]]
  first = choices[0]
  rows = [_row(first)]
  for choice in choices[1:]:
    rows.append(_row(choice, first))

  # The test split plays no part in the order: it is scored for the
  # best row only.
  rows.sort(key=lambda row: row["validation"]["mean"])
  return dict(
    about=dict(provenance),
    tuning=tuned,
    rows=rows,
    runs=list(runs),
  )


def time_of(provenance: Mapping[str, Any]) -> str:
  """The clock of the table and the figure.

  It is the processor's, which other programs disturb less, unless the budget is
  in seconds of the wall clock.
  """
  return (
    "seconds" if provenance["budget"][0] == "seconds" else "processor_seconds"
  )


def of_choice(runs: Sequence[Run], choice: str) -> list[Run]:
  """The runs with a value of the field, by seed."""
  runs = [run for run in runs if run["choice"] == choice]
  return sorted(runs, key=lambda run: run["seed"])


def _row(runs, first=()):
  """The row of a choice.

  Args:
    runs: its runs, at least one.
    first: the runs of the choice that gaps are measured from, or none.
  """
  bits = [run["validation"]["bits_per_dim"] for run in runs]
  accuracy = [run["validation"].get("accuracy") for run in runs]
  tests = [run["test"]["bits_per_dim"] for run in runs if run["test"]]

  row = dict(
    choice=runs[0]["choice"],
    seeds=len(runs),
    validation=mean(bits),
    values=bits,
    accuracy=None if None in accuracy else mean(accuracy),
    gap=None,
    test=mean(tests) if tests else None,
    receptive_field=runs[0]["receptive_field"],
    sees=runs[0]["sees"],
  )
  if first:
    minus = [run["validation"]["bits_per_dim"] for run in first]
    row["gap"] = mean(bits, minus)
  for name in ["keys", "steps"] + list(TIMES):
    row[name] = statistics.fmean(run[name] for run in runs)
  # Runs of one choice may differ here, and the largest one must fit.
  for name in "peak_bytes", "parameters":
    row[name] = max(run[name] for run in runs)
  return row


def mean(
  values: Sequence[float], minus: Sequence[float] = ()
) -> dict[str, Any]:
  """The mean of values minus the mean of others, with a confidence interval.

  The interval is that of Welch's t-test, which assumes no equal variances.
  Without `minus`, it is that of Student's t-test.

  Args:
    values: at least one.
    minus: the others, if any.

  Returns:
    `mean`, and `error`: half of the 95 % confidence interval; None if a mean is
    of a single value.
  """
  center = statistics.fmean(values) - (statistics.fmean(minus) if minus else 0)

  if 1 in (len(values), len(minus)):
    return dict(mean=center, error=None)

  with warnings.catch_warnings():
    # Values that are all equal have an error of 0; SciPy doubts its precision.
    warnings.simplefilter("ignore", RuntimeWarning)
    if minus:
      test = stats.ttest_ind(values, minus, equal_var=False)
    else:
      test = stats.ttest_1samp(values, 0)
  low, high = test.confidence_interval()
  return dict(mean=center, error=float(high - low) / 2)


def write_record(path: pathlib.Path, record: Record) -> None:
  """Writes a record, its lists of numbers on one line each."""
  # Curves have thousands of numbers; one a line would be unreadable.
  text = json.dumps(record, indent=1)
  text = re.sub(r"\[\n[^][{}]*\]", lambda x: re.sub(r"\n *", " ", x[0]), text)
  atomic.write_text(path, text + "\n")


class Band(NamedTuple):
  """The curves of several seeds, at common points.

  Attributes:
    x: [points], float, increasing.
    mean: [points], bits.
    lowest: [points], bits of the best seed at each point.
    highest: [points], bits of the worst seed at each point.
  """

  x: np.ndarray
  mean: np.ndarray
  lowest: np.ndarray
  highest: np.ndarray


def over_seeds(runs: Sequence[Run], axis: str) -> Band:
  """The curves of several seeds, by steps or by a clock.

  `x` are the points within all curves at which any seed was validated; there,
  the other curves are interpolated linearly.

  Args:
    runs: at least one, see `trials.collected`.
    axis: a column of `COLUMNS`.
  """
  lines = [run["curve"] for run in runs]

  # Where a line is missing, the mean of the others would jump.
  first = max(line[axis][0] for line in lines)
  last = min(line[axis][-1] for line in lines)
  points = {last}  # alone if these are single validations, at different times
  for line in lines:
    points.update(x for x in line[axis] if first <= x <= last)

  x = np.array(sorted(points), float)
  bits = [np.interp(x, line[axis], line["bits_per_dim"]) for line in lines]
  return Band(
    x=x,
    mean=np.mean(bits, axis=0),
    lowest=np.min(bits, axis=0),
    highest=np.max(bits, axis=0),
  )


def ranking(record: Record) -> Table:
  """The table of a record, best row first; its first row contains the titles.

  Columns without any value are left out, such as accuracy.
  """
  cells = [_cells(row, record["about"]) for row in record["rows"]]
  titles = [x for x in cells[0] if any(row[x] != "-" for row in cells)]
  table = [tuple(titles)]
  for row in cells:
    table.append(tuple(row[x] for x in titles))
  return table


def _cells(row, provenance):
  """{title: cell} of a row."""
  time = time_of(provenance)
  sees = {f"sees {name}": share(x) for name, x in row["sees"].items()}
  return {
    provenance["field"]: row["choice"],
    f"validation, {provenance['unit']}": _mean(row["validation"]),
    f"minus {provenance['choices'][0]}": _mean(row["gap"], "+"),
    "accuracy": _mean(row["accuracy"]),
    "test": _mean(row["test"]),
    "by seed": ", ".join(f"{x:.4f}" for x in row["values"]),
    "keys": f"{row['keys']:,.1f}",
    "receptive field": f"{row['receptive_field']:,}",
    **sees,
    "steps": f"{row['steps']:,.0f}",
    time.replace("_", " "): f"{row[time]:,.1f}",
    "peak": f"{row['peak_bytes'] / 2**20:,.0f} MiB",
  }


def _mean(value, sign=""):
  if value is None:
    return "-"
  text = f"{value['mean']:{sign}.4f}"
  error = value["error"]
  return text if error is None else f"{text} ± {error:.4f}"


def notes(record: Record) -> str:
  """A paragraph that explains the numbers of the table, and the figure."""
  provenance = record["about"]
  seeds = provenance["seeds"]
  text = "One seed."
  line = "of one seed"
  if seeds > 1:
    text = f"Mean of {seeds} seeds ± half of its 95 % confidence interval."
    line = "the mean of all seeds, in a band from the lowest to the highest"

  blind = _blind(record["rows"])
  number = provenance["config"]["eval"]["sequences"]
  part = f"the first {number} sequences" if number else "the entire split"
  return (
    f"{text} Validation: the entire split, scored by the best of each run's"
    " checkpoints in float32. Test: scored once, for the best on validation,"
    f" {record['rows'][0]['choice']}. Keys: per query, the mean over heads and"
    " layers. Receptive field: the most earlier symbols that a prediction can"
    f" depend on, through all layers.{blind} In the figure: validations during"
    f" training, of {part}; a line is {line}; its marker is the score of the"
    " table."
    f" By `{provenance['command']}`,"
    f" commit {provenance['commit'] or 'unknown'}."
  )


def _blind(rows):
  """Sentences on symbols that only some choices can see; "" if there are none.

  Such choices are no rivals: what they differ in is the symbol, not how well a
  pattern uses it.
  """
  text = ""
  for name in rows[0]["sees"]:
    blind = [row["choice"] for row in rows if not row["sees"].get(name)]
    if 0 < len(blind) < len(rows):
      text += (
        f" No position sees {name} with {', '.join(blind)}: how far these are"
        " behind says what the symbol is worth to a network of this size, not"
        " how well patterns use it."
      )
  return text


def grid(record: Record) -> tuple[Table, str]:
  """The table of tuning, and a note about it.

  Returns:
    Rows of cells with the titles first, one row per choice, with its best bits
    in brackets; and a text.
  """
  provenance = record["about"]
  tuned, candidates = provenance["tune"]
  cells = [(provenance["field"], *(f"{tuned}={x}" for x in candidates))]

  at_edge = []
  for choice, scores in record["tuning"]["scores"].items():
    texts = ["diverged" if x is None else f"{x:.4f}" for x in scores.values()]
    best = candidates.index(record["tuning"]["best"][choice])
    texts[best] = f"[{texts[best]}]"
    cells.append((choice, *texts))
    # Bits may still fall beyond the values that were tried.
    if best in (0, len(candidates) - 1):
      at_edge.append(choice)

  # JSON has a list in place of a `Budget`.
  kind, amount = provenance["tune_budget"] or provenance["budget"]
  note = (
    f"Bits on the validation split of one run each of {amount:,g}"
    f" {kind.replace('_', ' ')}, of a seed that is not compared. In brackets:"
    " the best, used for the other runs."
  )
  if at_edge:
    choices = ", ".join(at_edge)
    note += f" At the edge, so a value beyond may be better: {choices}."
  return cells, note


def draw_curves(record: Record) -> "style.Figure":
  """A figure of validation bits by time and by steps.

  The marker at the end of a curve is the score of the table. It is not
  connected, because it is of the best checkpoint and of the entire split, while
  the curve may be of a part of it.
  """
  provenance = record["about"]

  names = [patterns.shorten(choice) for choice in provenance["choices"]]
  # The legend is beside the panels, as wide as its longest name; many names may
  # need more height than the panels.
  width = 2 * PANEL + LETTER * (5 + max(map(len, names)))
  height = max(PANEL, 0.22 * len(names))
  figure, panels = style.subplots(1, 2, width, height)
  by_time, by_steps = panels[0]
  _draw_panel(by_time, record, time_of(provenance))
  _draw_panel(by_steps, record, "steps")

  by_steps.sharey(by_time)
  by_time.set_ylabel(f"validation, {provenance['unit']}")
  # A step is a measure of work only if all runs have as many tokens in it.
  sizes = {run["tokens_per_step"] for run in record["runs"]}
  if len(sizes) == 1:
    by_steps.set_xlabel(f"steps of {sizes.pop():,} tokens")
  figure.legend(by_time.lines, names, loc="outside right upper", frameon=False)
  return figure


def _draw_panel(panel, record, axis):
  """Draws the curve of each choice by a column of `COLUMNS`."""
  scores = {row["choice"]: row["validation"]["mean"] for row in record["rows"]}
  for i, choice in enumerate(record["about"]["choices"]):
    band = over_seeds(of_choice(record["runs"], choice), axis)

    color = style.COLORS[i % len(style.COLORS)]

    # The last point is the score; only this one has a marker. A point that is
    # not a number separates it from the curve.
    panel.plot(
      np.append(band.x, [band.x[-1], band.x[-1]]),
      np.append(band.mean, [np.nan, scores[choice]]),
      color=color,
      lw=1.6,
      marker=MARKERS[i % len(MARKERS)],
      markevery=[-1],
      ms=4.5,
    )
    panel.fill_between(
      band.x, band.lowest, band.highest, color=color, alpha=0.2, lw=0
    )

  style.open_frame(panel)
  panel.set_xlabel(axis.replace("_", " "))
  panel.set_xlim(left=0)
  panel.xaxis.set_major_formatter("{x:,.10g}")
  panel.locator_params(axis="x", nbins=6)


def render(record: Record) -> str:
  """The tables, as Markdown."""
  text = f"{tables.markdown(ranking(record))}\n{notes(record)}\n"
  if record["tuning"]:
    cells, note = grid(record)
    text += f"\n## Tuning\n\n{tables.markdown(cells)}\n{note}\n"
  return text


def write_results(root: pathlib.Path, record: Record) -> None:
  """Writes a record as comparison.json, .md and .png."""
  write_record(root / "comparison.json", record)
  atomic.write_text(root / "comparison.md", render(record))
  style.save(draw_curves(record), root / "comparison.png")
