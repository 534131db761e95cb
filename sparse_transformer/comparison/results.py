"""The results of a comparison as rows, a table and a page."""

import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sparse_transformer import tables
from sparse_transformer.comparison.choices import folder_name
from sparse_transformer.figures import curves, html
from sparse_transformer.training import metrics


def summarize(
  results: Mapping[str, Sequence[Mapping[str, Any]]],
) -> list[dict[str, Any]]:
  """A row for each choice: means over runs, and the deviation of the bits."""
  rows = []
  for choice, runs in results.items():
    bits = [run["bits_per_dim"] for run in runs]
    rows.append(
      dict(
        choice=choice,
        bits_per_dim=statistics.fmean(bits),
        deviation=statistics.stdev(bits) if len(bits) > 1 else None,
        seeds=len(runs),
        steps=_mean(runs, "steps"),
        seconds=_mean(runs, "seconds"),
        tokens_per_second=_mean(runs, "tokens_per_second"),
        flops=_mean(runs, "flops"),
        peak_bytes=max(run["peak_bytes"] for run in runs),
      )
    )
  return rows


def _mean(runs, field):
  values = [run[field] for run in runs if run[field] is not None]
  return statistics.fmean(values) if values else None


def table(
  field: str, rows: Sequence[Mapping[str, Any]], unit: str
) -> list[tuple[str, ...]]:
  """The rows as cells of text; the first row contains the titles."""
  titles = (
    field,
    unit,
    "deviation",
    "steps",
    "seconds",
    "tokens/s",
    "peak",
    "FLOPs",
  )
  return [titles, *map(_cells, rows)]


def _cells(row):
  def number(field, form):
    return "-" if row[field] is None else form.format(row[field])

  return (
    row["choice"],
    number("bits_per_dim", "{:.4f}"),
    number("deviation", "{:.4f}"),
    number("steps", "{:,.0f}"),
    number("seconds", "{:,.0f}"),
    number("tokens_per_second", "{:,.0f}"),
    f"{row['peak_bytes'] / 2**20:,.0f} MiB",
    number("flops", "{:.3g}"),
  )


def write(
  root: pathlib.Path,
  about: Mapping[str, Any],
  rows: Sequence[Mapping[str, Any]],
  unit: str,
) -> str:
  """Writes comparison.json, .md and .html, and returns the Markdown."""
  cells = table(about["field"], rows, unit)
  text = tables.markdown(cells)
  (root / "comparison.json").write_text(
    json.dumps(dict(about=about, rows=rows), indent=1) + "\n"
  )
  (root / "comparison.md").write_text(text)
  (root / "comparison.html").write_text(_page(root, about, cells, unit))
  return text


def _page(root, about, cells, unit):
  kind, amount = about["budget"]
  plural = "" if about["seeds"] == 1 else "s"
  lines = {
    choice: metrics.read(root / folder_name(choice) / "seed0")
    for choice in about["choices"]
  }
  return html.page(
    f"{about['field']}, {amount:g} {kind} each",
    html.table(cells),
    html.note(
      f"{about['split']} split, {about['seeds']} seed{plural}; on"
      f" {about['machine']}"
    ),
    html.section(
      "Curves of the first seed",
      html.figure(curves.bits_by_step(lines, unit), "bits by step"),
    ),
    html.section(
      "Config", html.preformatted(json.dumps(about["config"], indent=2))
    ),
  )
