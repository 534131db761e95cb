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


def table(record: Record) -> list[tuple[str, ...]]:
  """The rows of a record as cells of text; the first has the titles.

  Without columns of which nothing is known.
  """
  about, equal = record["about"], record["equal"]
  time = record_lib.time_of(record)
  titles = (
    about["field"],
    f"validation, {about['unit']}",
    f"minus {about['choices'][0]}",
    "accuracy",
    *(
      f"at {_amount(x)} {record_lib.LABELS[axis]}" for axis, x in equal.items()
    ),
    "test",
    "keys",
    "steps",
    time.replace("_", " "),
    "tokens per processor second",
    "peak",
    "FLOPs",
  )
  rows = [_cells(row, time) for row in record["rows"]]
  columns = zip(titles, *rows, strict=True)
  known = [cells for cells in columns if {*cells[1:]} != {"-"}]
  return [*zip(*known, strict=True)]


def _cells(row, time):
  def number(name, form):
    return "-" if row[name] is None else form.format(row[name])

  return (
    row["choice"],
    _mean(row["validation"]),
    _mean(row["gap"], "+"),
    _mean(row["accuracy"]),
    *map(_mean, row["equal"].values()),
    _mean(row["test"]),
    number("keys", "{:,.1f}"),
    number("steps", "{:,.0f}"),
    "-" if row[time] is None else _amount(row[time]),
    number("tokens_per_processor_second", "{:,.0f}"),
    f"{row['peak_bytes'] / 2**20:,.0f} MiB",
    number("flops", "{:.3g}"),
  )


def by_seed(record: Record) -> list[tuple[str, ...]]:
  """A table of the values of all seeds, and their times to the target."""
  about, target = record["about"], record["about"]["target"]
  first = about["first_seed"]
  seeds = range(first, first + about["seeds"])
  titles = [about["field"], *(f"seed {seed}" for seed in seeds)]
  if target:
    unit = f"{target:g} {about['unit']}"
    titles.append(f"processor seconds to {unit}, by seed")
  cells = [tuple(titles)]
  for row in record["rows"]:
    times = ["-" if x is None else _amount(x) for x in row["time_to_target"]]
    bits = [f"{x:.4f}" for x in row["values"]]
    cells.append((row["choice"], *bits, *[", ".join(times)] * bool(target)))
  return cells


def grid(record: Record) -> list[tuple[str, ...]]:
  """A table of the scores of tuning, the best of each choice in brackets."""
  about, tuning = record["about"], record["tuning"]
  tuned, candidates = about["tune"]
  cells = [(about["field"], *(f"{tuned}={x}" for x in candidates))]
  for choice, scores in tuning["scores"].items():
    texts = ["diverged" if x is None else f"{x:.4f}" for x in scores.values()]
    best = candidates.index(tuning["best"][choice])
    texts[best] = f"[{texts[best]}]"
    cells.append((choice, *texts))
  return cells


def _grid_notes(record):
  about, best = record["about"], record["tuning"]["best"]
  tuned, candidates = about["tune"]
  kind, amount = about["tune_budget"] or about["budget"]
  text = (
    f"{tuned}, tuned for each {about['field']}: bits on the validation split"
    f" of one run each of {amount:,g} {kind.replace('_', ' ')}, of a seed that"
    " is not compared. In"
    " brackets: the best, used for the other runs."
  )
  edge = [x for x in best if record_lib.at_edge(candidates, best[x])]
  if edge:
    text += (
      f" At the edge of the grid, so a value beyond it may be better:"
      f" {', '.join(edge)}."
    )
  return text


def _details(record):
  """(title, table, note) of what the main table leaves out."""
  about = record["about"]
  if about["seeds"] > 1 or about["target"]:
    yield "By seed", by_seed(record), f"Validation, {about['unit']}."
  if record["tuning"]:
    yield "Tuning", grid(record), _grid_notes(record)


def _amount(number):
  return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _mean(value, sign=""):
  """A mean with its error, if it has one."""
  if value is None:
    return "-"
  text = f"{value['mean']:{sign}.4f}"
  if value["error"] is not None:
    text += f" ± {value['error']:.4f}"
  return text


def notes(record: Record) -> str:
  """Explains the numbers of the table."""
  about, best = record["about"], record["rows"][0]["choice"]
  seeds = about["seeds"]
  text = "One seed. "
  if seeds > 1:
    text = f"Mean of {seeds} seeds ± half of its 95 % confidence interval. "
  text += (
    "Validation: the entire split, scored by the best of each run's checkpoints"
    " in float32."
  )
  if record["rows"][0]["test"] is not None:
    text += f" Test: scored once, for the best on validation, {best}."
  if record["rows"][0]["keys"] is not None:
    text += " Keys: per query, the mean over heads and layers."
  if record["equal"]:
    number = about["config"]["eval"]["sequences"]
    some = f"the first {number} sequences" if number else "the entire split"
    text += (
      f" At equal amounts: read off the validations during training, of {some}."
    )
  return text


def draw(record: Record) -> "style.Figure":
  """Validation bits during training, a line for each choice.

  A line is the mean over the seeds; around it, a band from the lowest to the
  highest. There is a panel for each of `record.axes`; tokens are above steps
  where all steps have the same number.
  """
  names = [_shorten(choice) for choice in record["about"]["choices"]]
  axes = record_lib.axes(record)
  width = WIDTH * len(axes) + LETTER * (5 + max(map(len, names)))
  height = max(HEIGHT, 0.22 * len(names))
  figure, grid = style.subplots(1, len(axes), width, height)
  figure.set_layout_engine("constrained")
  for axis, panel in zip(axes, grid[0], strict=True):
    if panel is not grid[0, 0]:
      panel.sharey(grid[0, 0])
    _draw_panel(panel, record, axis)
  lines = grid[0, 0].lines
  figure.legend(lines, names, loc="outside right upper", frameon=False)
  if "tokens" not in axes:
    _add_tokens(grid[0, -1], record["runs"][0]["tokens_per_step"])
  grid[0, 0].set_ylabel(f"validation, {record['about']['unit']}")
  return figure


def caption(record: Record) -> str:
  """Explains the lines and bands of the figure."""
  seeds = record["about"]["seeds"]
  if seeds == 1:
    return "Lines: validation during training, of one seed."
  return (
    f"Lines: validation during training, mean of {seeds} seeds. Bands: from the"
    " lowest to the highest of them."
  )


def _draw_panel(panel, record, axis):
  """The lines of all choices against one axis."""
  for i, choice in enumerate(record["about"]["choices"]):
    runs = record_lib.of_choice(record["runs"], choice)
    x, mean, low, high = record_lib.over_seeds(runs, axis)
    color = style.COLORS[i % len(style.COLORS)]
    if len(runs) > 1:
      panel.fill_between(x, low, high, color=color, alpha=0.2, lw=0)
    panel.plot(
      x,
      mean,
      color=color,
      lw=1.6,
      marker=MARKERS[i % len(MARKERS)],
      markevery=[-1],
      ms=4.5,
    )
  panel.spines[["top", "right"]].set_visible(False)
  panel.set_axisbelow(True)
  panel.grid(color=style.GRID, lw=0.6)
  panel.set_xlabel(record_lib.LABELS[axis])
  panel.set_xlim(left=0)
  panel.xaxis.set_major_formatter(_format(axis))
  panel.locator_params(axis="x", nbins=6)


def _add_tokens(panel, size):
  """A second scale above a panel of steps of `size` tokens each."""
  above = panel.secondary_xaxis(
    "top", functions=(lambda x: x * size, lambda x: x / size)
  )
  above.set_xlabel(record_lib.LABELS["tokens"])
  above.xaxis.set_major_formatter(_format("tokens"))
  above.spines["top"].set_visible(False)
  above.locator_params(axis="x", nbins=6)


def _format(axis):
  """The format of numbers along an axis: 12k tokens, but 12,000 steps."""
  from matplotlib import ticker

  return ticker.EngFormatter(sep="") if axis == "tokens" else "{x:,.10g}"


def _shorten(name):
  if len(name) <= MAX_LABEL:
    return name
  half = (MAX_LABEL - 3) // 2
  return f"{name[:half]} … {name[-half:]}"


def write(root: pathlib.Path, record: Record) -> str:
  """Writes comparison.json, .md, .png and .html; returns the Markdown."""
  record_lib.write(root / "comparison.json", record)
  cells = table(record)
  text = f"{tables.markdown(cells)}\n{notes(record)}\n"
  for title, more, note in _details(record):
    text += f"\n## {title}\n\n{tables.markdown(more)}\n{note}\n"
  atomic.write_text(root / "comparison.md", text)
  with atomic.writing(root / "comparison.png") as new:
    draw(record).savefig(new, format="png")
  atomic.write_text(root / "comparison.html", _page(root, record, cells))
  return text


def _page(root, record, cells):
  about = record["about"]
  kind, amount = about["budget"]
  made = [
    f"on {about['machine']}",
    *(f"{name} {number}" for name, number in about["versions"].items()),
  ]
  if about["commit"]:
    made.insert(1, f"commit {about['commit']}")
  return html.page(
    f"{about['field']}, {amount:,g} {kind.replace('_', ' ')} each",
    html.table(cells),
    html.note(notes(record)),
    *(
      html.section(title, html.table(more), html.note(note))
      for title, more, note in _details(record)
    ),
    html.section(
      "Curves",
      html.picture(root / "comparison.png", "bits by time, tokens and steps"),
      html.note(caption(record)),
    ),
    html.section(
      "Made",
      html.preformatted(about["command"]),
      html.note(", ".join(made)),
    ),
    html.section(
      "Config", html.preformatted(json.dumps(about["config"], indent=2))
    ),
  )
