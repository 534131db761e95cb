"""The record of a comparison, with its tables and its figure.

See docs/compare.md.
"""

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

# {column of a curve: field in the lines of metrics}.
COLUMNS = {"steps": "step"} | {x: x for x in (*TIMES, "bits_per_dim")}
# The side of a panel, in inches.
PANEL = 3.4
# The width of a letter in the legend, in inches.
LETTER = 0.08
# Markers at the ends of lines, which distinguish lines in addition to colors.
# There is one marker more than colors, so that when colors repeat, markers
# differ.
MARKERS = "os^Dv<>P"


def curve(lines: Iterable[Mapping]) -> Run:
  """Returns the validation curve of a run, from the lines of its metrics.

  Returns:
    {column: values} for the columns of `COLUMNS`. Values are rounded to 5
    decimals, to keep comparison.json small.
  """
  values = curves.series(lines, "validation", COLUMNS.values())
  return {x: [round(y, 5) for y in values[COLUMNS[x]]] for x in COLUMNS}


def tuning(trials: Iterable[Trial], scores: Iterable[Run | None]) -> Run:
  """Returns the part of a record about tuning.

  Args:
    trials: the tuning runs.
    scores: the scores of these runs, see `trials.scored`, in the same order;
      None if training diverged.

  Returns:
    A dict with two entries. `scores` is {choice: {candidate: bits}}, where bits
    are None if training diverged. `best` is {choice: its best candidate}.

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
        " set other values"
      )
    # If bits are equal, the candidate is chosen by its text, so that the choice
    # is always the same.
    _, best[choice] = min(finite)
  return dict(scores=table, best=best)


def make_record(
  provenance: Mapping[str, Any],
  runs: Sequence[Run],
  tuned: Run | None = None,
) -> Record:
  """Returns the record of finished runs, with the best choice in the first row.

  Args:
    provenance: the description of the comparison, as `Comparison.about` returns
      it, together with the unit of losses, the commit, the versions and the
      command.
    runs: the runs, see `trials.collected`.
    tuned: the result of `tuning`, or None without tuning.
  """
  # Gaps are measured from the first choice on the command line, which is the
  # user's baseline.
  choices = [of_choice(runs, choice) for choice in provenance["choices"]]
  first = choices[0]
  rows = [_row(first)]
  for choice in choices[1:]:
    rows.append(_row(choice, first))

  # Rows are sorted by validation only, because the test split is scored only
  # for the best row.
  rows.sort(key=lambda row: row["validation"]["mean"])
  return dict(
    about=dict(provenance),
    tuning=tuned,
    rows=rows,
    runs=list(runs),
  )


def time_of(provenance: Mapping[str, Any]) -> str:
  """Returns the clock that the table and the figure use.

  If the budget is in seconds of elapsed time, the clock is elapsed time.
  Otherwise, it is CPU time, which depends less on other programs.
  """
  return (
    "seconds" if provenance["budget"][0] == "seconds" else "processor_seconds"
  )


def of_choice(runs: Sequence[Run], choice: str) -> list[Run]:
  """Returns the runs with a choice, sorted by seed."""
  runs = [run for run in runs if run["choice"] == choice]
  return sorted(runs, key=lambda run: run["seed"])


def _row(runs, first=()):
  """Returns the row of a choice.

  Args:
    runs: the runs with this choice, at least one.
    first: the runs of the baseline. The gap of a row is the difference from
      their mean. If empty, the row has no gap.
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
  # Runs with one choice may differ in these. Report the maximum, because the
  # largest run must fit in memory.
  for name in "peak_bytes", "parameters":
    row[name] = max(run[name] for run in runs)
  return row


def mean(
  values: Sequence[float], minus: Sequence[float] = ()
) -> dict[str, Any]:
  """Returns a mean, or a difference of two means, with a confidence interval.

  For a difference, the interval is computed by Welch's t-test, which does not
  assume equal variances. For a single mean, it is computed by Student's t-test.

  Args:
    values: at least one value.
    minus: the values whose mean is subtracted; may be empty.

  Returns:
    A dict of `mean` and `error`, which is half of the 95 % confidence interval.
    The error is None if `values` or `minus` contains only one value.
  """
  center = statistics.fmean(values) - (statistics.fmean(minus) if minus else 0)

  if 1 in (len(values), len(minus)):
    return dict(mean=center, error=None)

  with warnings.catch_warnings():
    # If all values are equal, the error is 0, and SciPy warns about a loss of
    # precision.
    warnings.simplefilter("ignore", RuntimeWarning)
    if minus:
      test = stats.ttest_ind(values, minus, equal_var=False)
    else:
      test = stats.ttest_1samp(values, 0)
  low, high = test.confidence_interval()
  return dict(mean=center, error=float(high - low) / 2)


def write_record(path: pathlib.Path, record: Record) -> None:
  """Writes a record as JSON, with each list of numbers on one line."""
  # Curves contain thousands of numbers, so one number per line would be
  # unreadable.
  text = json.dumps(record, indent=1)
  text = re.sub(r"\[\n[^][{}]*\]", lambda x: re.sub(r"\n *", " ", x[0]), text)
  atomic.write_text(path, text + "\n")


class Band(NamedTuple):
  """The curves of several seeds at common points.

  Attributes:
    x: the points, in increasing order, float [points].
    mean: the mean bits over seeds, [points].
    lowest: the bits of the best seed at each point, [points].
    highest: the bits of the worst seed at each point, [points].
  """

  x: np.ndarray
  mean: np.ndarray
  lowest: np.ndarray
  highest: np.ndarray


def over_seeds(runs: Sequence[Run], axis: str) -> Band:
  """Returns the curves of several seeds, by steps or by a clock.

  The points are all steps or times at which some seed was validated, within the
  range that all curves cover. If a seed was not validated at a point, its curve
  is interpolated linearly.

  Args:
    runs: at least one run, see `trials.collected`.
    axis: a column of `COLUMNS`.
  """
  lines = [run["curve"] for run in runs]

  # Use only the range that all curves cover. Elsewhere, the mean would jump.
  first = max(line[axis][0] for line in lines)
  last = min(line[axis][-1] for line in lines)
  # If each curve is a single point, at different times, only `last` remains.
  points = {last}
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
  """Returns the table of a record, with titles first and then the best row.

  Columns without values, such as accuracy, are omitted.
  """
  cells = [_cells(row, record["about"]) for row in record["rows"]]
  titles = [x for x in cells[0] if any(row[x] != "-" for row in cells)]
  table = [tuple(titles)]
  for row in cells:
    table.append(tuple(row[x] for x in titles))
  return table


def _cells(row, provenance):
  """Returns {title: cell} for a row."""
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
  """Returns a paragraph that explains the table and the figure."""
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
  """Returns sentences about symbols that only some choices can see, or "".

  Such choices are not comparable with the others. Their gap includes the value
  of the symbols that they cannot see, so it does not show how well their
  patterns use the other symbols.
  """
  text = ""
  for name in rows[0]["sees"]:
    blind = [row["choice"] for row in rows if not row["sees"].get(name)]
    if 0 < len(blind) < len(rows):
      text += (
        f" With {', '.join(blind)}, no position sees {name}. Their gap"
        " includes the worth of the symbols that they cannot see, so it does"
        " not show how well their patterns work."
      )
  return text


def grid(record: Record) -> tuple[Table, str]:
  """Returns the table of tuning, and a note about it.

  Returns:
    (table, note). The first row of the table contains the titles. Each further
    row contains the bits of one choice, with the best in brackets.
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
    # If the best candidate is at the edge, a value beyond it may be better.
    if best in (0, len(candidates) - 1):
      at_edge.append(choice)

  # In JSON, a `Budget` is a list.
  kind, amount = provenance["tune_budget"] or provenance["budget"]
  note = (
    f"Bits on the validation split, from one run of {amount:,g}"
    f" {kind.replace('_', ' ')} each, with a seed that is not compared. The"
    " best, in brackets, is used for the other runs."
  )
  if at_edge:
    choices = ", ".join(at_edge)
    note += (
      " The best is the first or last candidate, so a value beyond it may be"
      f" better: {choices}."
    )
  return cells, note


def draw_curves(record: Record) -> "style.Figure":
  """Draws a figure of validation bits by time and by steps.

  The marker at the end of a curve shows the score in the table: the score of
  the best checkpoint on the entire split. The marker is not connected to the
  curve, because the curve may show scores on only a part of the split.
  """
  provenance = record["about"]

  names = [patterns.shorten(choice) for choice in provenance["choices"]]
  # The legend is beside the panels. Its width depends on the longest name, and
  # with many names it may be higher than the panels.
  width = 2 * PANEL + LETTER * (5 + max(map(len, names)))
  height = max(PANEL, 0.22 * len(names))
  figure, panels = style.subplots(1, 2, width, height)
  by_time, by_steps = panels[0]
  _draw_panel(by_time, record, time_of(provenance))
  _draw_panel(by_steps, record, "steps")

  by_steps.sharey(by_time)
  by_time.set_ylabel(f"validation, {provenance['unit']}")
  # Show the tokens per step only if they are the same for all runs.
  sizes = {run["tokens_per_step"] for run in record["runs"]}
  if len(sizes) == 1:
    by_steps.set_xlabel(f"steps of {sizes.pop():,} tokens")
  figure.legend(by_time.lines, names, loc="outside right upper", frameon=False)
  return figure


def _draw_panel(panel, record, axis):
  """Draws the curve of each choice against a column of `COLUMNS`."""
  scores = {row["choice"]: row["validation"]["mean"] for row in record["rows"]}
  for i, choice in enumerate(record["about"]["choices"]):
    band = over_seeds(of_choice(record["runs"], choice), axis)

    color = style.COLORS[i % len(style.COLORS)]

    # The last point is the score, and only this point has a marker. A point at
    # nan separates it from the curve.
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
  """Returns the tables and notes of a record as Markdown."""
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
