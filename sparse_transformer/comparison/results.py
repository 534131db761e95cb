"""A comparison's record as a table and a page."""

import json
import pathlib

from sparse_transformer import tables
from sparse_transformer.comparison import plots, record as record_lib
from sparse_transformer.comparison.record import Record
from sparse_transformer.figures import html


def table(record: Record) -> list[tuple[str, ...]]:
  """The rows of a record as cells of text; the first has the titles."""
  about, equal = record["about"], record["equal"]
  time = record_lib.time_of(record)
  titles = (
    about["field"],
    f"validation, {about['unit']}",
    f"minus {about['choices'][0]}",
    *(f"at {x:,.0f} {record_lib.LABELS[axis]}" for axis, x in equal.items()),
    "test",
    "steps",
    time.replace("_", " "),
    "tokens/s",
    "peak",
    "FLOPs",
  )
  return [titles, *(_cells(row, time) for row in record["rows"])]


def _cells(row, time):
  def number(name, form):
    return "-" if row[name] is None else form.format(row[name])

  return (
    row["choice"],
    _mean(row["validation"]),
    _mean(row["gap"], "+"),
    *map(_mean, row["equal"].values()),
    _mean(row["test"]),
    number("steps", "{:,.0f}"),
    number(time, "{:,.0f}" if (row[time] or 0) >= 10 else "{:.2g}"),
    number("tokens_per_second", "{:,.0f}"),
    f"{row['peak_bytes'] / 2**20:,.0f} MiB",
    number("flops", "{:.3g}"),
  )


def _mean(value, sign=""):
  """A mean with its deviation, if it has one."""
  if value is None:
    return "-"
  text = f"{value['mean']:{sign}.4f}"
  if value["deviation"] is not None:
    text += f" ± {value['deviation']:.4f}"
  return text


def notes(record: Record) -> str:
  """Explains the numbers of the table."""
  about, best = record["about"], record["rows"][0]["choice"]
  seeds = about["seeds"]
  text = "One seed. "
  if seeds > 1:
    text = f"Mean and standard deviation of {seeds} seeds. "
  text += (
    "Validation: the entire split, scored by the best of each run's checkpoints"
    " in float32; differences are taken seed by seed. Test: scored once, for"
    f" the best on validation, {best}."
  )
  if record["equal"]:
    text += (
      " At equal amounts: read off the validations during training, of"
      " eval.sequences sequences."
    )
  return text


def write(root: pathlib.Path, record: Record) -> str:
  """Writes comparison.json, .md, .png and .html; returns the Markdown."""
  record_lib.write(root / "comparison.json", record)
  cells = table(record)
  text = f"{tables.markdown(cells)}\n{notes(record)}\n"
  (root / "comparison.md").write_text(text)
  plots.draw(record).savefig(root / "comparison.png")
  (root / "comparison.html").write_text(_page(root, record, cells))
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
    html.section(
      "Curves",
      html.picture(root / "comparison.png", "bits by time, tokens and steps"),
      html.note(plots.caption(record)),
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
