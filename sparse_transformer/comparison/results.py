"""A comparison's record as a table, a figure and a page."""

import json
import pathlib

from sparse_transformer import atomic, tables
from sparse_transformer.comparison import record as record_lib
from sparse_transformer.comparison.record import Record
from sparse_transformer.figures import html, style

WIDTH, HEIGHT = 3.4, 3.4  # of a panel, in inches
MAX_LABEL = 48  # characters of a choice
LETTER = 0.08  # width of one, in inches
MARKERS = "os^Dv<>"  # at the end of a line, as a second way to tell them apart
LABELS = {
  "processor_seconds": "processor seconds of training",
  "seconds": "seconds of training",
  "steps": "steps",
}
Table = list[tuple[str, ...]]


def ranking(record: Record) -> Table:
  """The rows of a record as cells of text; the first has the titles.

  Without columns of which nothing is known.
  """
  about, rows = record["about"], record["rows"]
  time, _ = record_lib.axes(about)
  rate = "tokens_per_processor_second"
  columns = {
    about["field"]: [row["choice"] for row in rows],
    f"validation, {about['unit']}": [_mean(row["validation"]) for row in rows],
    f"minus {about['choices'][0]}": [_mean(row["gap"], "+") for row in rows],
    "accuracy": [_mean(row["accuracy"]) for row in rows],
  } | {
    f"at {_number(x)} {LABELS[axis]}": [_mean(y["equal"][axis]) for y in rows]
    for axis, x in record["equal"].items()
  }
  columns["test"] = [_mean(row["test"]) for row in rows]
  forms = dict(keys=",.1f", steps=",.0f") | {time: "", rate: ",.0f"}
  for name, form in (forms | dict(flops=".3g")).items():
    title = name.replace("_", " ").replace("flops", "FLOPs")
    columns[title] = [_number(row[name], form) for row in rows]
  columns["peak"] = [f"{x['peak_bytes'] / 2**20:,.0f} MiB" for x in rows]
  known = [(x, *y) for x, y in columns.items() if {*y} != {"-"}]
  return [*zip(*known, strict=True)]


def _number(x, form=""):
  if x is None:
    return "-"
  return f"{x:{form or (',.0f' if x >= 10 else '.2g')}}"


def _mean(value, sign=""):
  """A mean with its error, if it has one."""
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
  text += (
    " Validation: the entire split, scored by the best of each run's"
    " checkpoints in float32."
  )
  if best["test"]:
    text += f" Test: scored once, for the best on validation, {best['choice']}."
  number = about["config"]["eval"]["sequences"]
  some = f"the first {number} sequences" if number else "the entire split"
  return (
    f"{text} Keys: per query, the mean over heads and layers. At equal amounts,"
    f" and in the figure: the validations during training, of {some}; a line is"
    f" {lines}."
  )


def by_seed(record: Record) -> Table:
  """A table of the values of all seeds, and their times to the target."""
  about, target = record["about"], record["about"]["target"]
  first = about["first_seed"]
  titles = [f"seed {x}" for x in range(first, first + about["seeds"])]
  if target:
    unit = f"{target:g} {about['unit']}"
    titles.append(f"processor seconds to {unit}, by seed")
  cells = [(about["field"], *titles)]
  for row in record["rows"]:
    bits = [f"{x:.4f}" for x in row["values"]]
    times = ", ".join(map(_number, row["time_to_target"]))
    cells.append((row["choice"], *bits, *[times] * bool(target)))
  return cells


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
  try:
    ends = {end(candidates, key=float) for end in (min, max)}
  except ValueError:  # they have no order
    ends = set()
  if edge := [choice for choice, x in found["best"].items() if x in ends]:
    note += f" At the edge, so a value beyond may be better: {', '.join(edge)}."
  return cells, note


def draw_curves(record: Record) -> "style.Figure":
  """Validation bits by time and by steps, a line for each choice."""
  about, runs = record["about"], record["runs"]
  names = [_shorten(choice) for choice in about["choices"]]
  width = 2 * WIDTH + LETTER * (5 + max(map(len, names)))
  figure, panels = style.subplots(1, 2, width, max(HEIGHT, 0.22 * len(names)))
  figure.set_layout_engine("constrained")
  for axis, panel in zip(record_lib.axes(about), panels[0], strict=True):
    for i, choice in enumerate(about["choices"]):
      found = record_lib.over_seeds(record_lib.of_choice(runs, choice), axis)
      color = style.COLORS[i % len(style.COLORS)]
      end = dict(marker=MARKERS[i % len(MARKERS)], markevery=[-1], ms=4.5)
      panel.plot(*found[:2], color=color, lw=1.6, **end)
      panel.fill_between(found[0], *found[2:], color=color, alpha=0.2, lw=0)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color=style.GRID, lw=0.6)
    panel.set_xlabel(LABELS[axis])
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


def _shorten(name):
  half = (MAX_LABEL - 3) // 2
  return name if len(name) <= MAX_LABEL else f"{name[:half]} … {name[-half:]}"


def write_results(root: pathlib.Path, record: Record) -> str:
  """Writes comparison.json, .md, .png and .html; returns the Markdown."""
  about = record["about"]
  parts = {"": (ranking(record), notes(record))}
  if about["seeds"] > 1 or about["target"]:
    parts["By seed"] = by_seed(record), f"Validation, {about['unit']}."
  if record["tuning"]:
    parts["Tuning"] = grid(record)
  text, sections = "", []
  for title, (cells, note) in parts.items():
    text += f"\n## {title}\n\n" if title else ""
    text += f"{tables.markdown(cells)}\n{note}\n"
    body = html.table(cells), html.note(note)
    sections.append(html.section(title, *body) if title else "\n".join(body))
  record_lib.write_record(root / "comparison.json", record)
  atomic.write_text(root / "comparison.md", text)
  with atomic.writing(root / "comparison.png") as new:
    draw_curves(record).savefig(new, format="png")
  (kind, amount), versions = about["budget"], about["versions"]
  made = [f"on {about['machine']}", f"commit {about['commit']}"]
  made += [f"{name} {number}" for name, number in versions.items()]
  page = html.page(
    f"{about['field']}, {amount:,g} {kind.replace('_', ' ')} each",
    *sections,
    html.section("Curves", html.picture(root / "comparison.png", "bits")),
    html.section("Made", html.preformatted(about["command"])),
    html.note(", ".join(made)),
    html.section(
      "Config", html.preformatted(json.dumps(about["config"], indent=2))
    ),
  )
  atomic.write_text(root / "comparison.html", page)
  return text
