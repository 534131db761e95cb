"""Figures of bits by training step, by position and by pixel."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sparse_transformer.figures import style

# Inches of a figure with a single panel.
WIDTH = 5
HEIGHT = 3.2
# The side of a channel's panel, in inches.
PANEL = 2.6
# The smallest range of the color scale, in bits. Differences that are only
# noise then look flat.
LEAST = 0.01
# The number of blocks of positions whose means are drawn.
BLOCKS = 64
LOOKS = {
  "train": dict(color=style.LIGHT, lw=0.8),
  "validation": dict(color=style.DARK, lw=2, marker="."),
}
# Lines of metrics.jsonl, as dictionaries.
Lines = Iterable[Mapping[str, Any]]


def series(
  lines: Lines, split: str, fields: Iterable[str]
) -> dict[str, list[float]]:
  """Returns the values of fields in the metrics of a split.

  Args:
    lines: lines of metrics.jsonl, as dictionaries.
    split: "train", "validation" or "test".
    fields: names of fields that all lines of the split have.

  Returns:
    {field: its values, in the order of the lines}.
  """
  of_split = [line for line in lines if line["split"] == split]
  return {field: [line[field] for line in of_split] for field in fields}


def bits_by_step(lines: Sequence[Mapping], unit: str) -> "style.Figure":
  """Plots the training curve and the validation curve of a run.

  Args:
    lines: lines of metrics.jsonl, as dictionaries.
    unit: unit of losses, which labels the y axis.
  """
  figure, axis = _axis(xlabel="step", ylabel=unit)
  for split, look in LOOKS.items():
    # A run that has just begun has no validation lines yet.
    values = series(lines, split, ("step", "bits_per_dim"))
    if values["step"]:
      _plot(axis, values["step"], values["bits_per_dim"], label=split, **look)
      axis.legend(frameon=False)
  return figure


def bits_by_position(
  bits_L: np.ndarray, result: Mapping[str, Any]
) -> "style.Figure":
  """Plots mean bits by position in the window, to show how context is used.

  Positions that are scored only in the first window are omitted.

  Args:
    bits_L: [length], mean bits of each position; NaN if it was not scored.
    result: the result that `eval.py` prints.
  """
  min_context = result["min_context"]
  label = "position in window"
  if min_context:
    label += f", with at least {min_context:,} before it"
  figure, axis = _axis(xlabel=label, ylabel=result["unit"])
  axis.set_title(_title(result), fontsize="medium")

  # The first window scores all of its positions, but other windows score only
  # their last ones. The means of the first positions would come from a single
  # window.
  shown = bits_L[min_context:]
  first = min_context + 1
  end = len(bits_L) + 1
  axis.plot(np.arange(first, end), shown, ".", ms=2, color=style.LIGHT)

  # Positions are averaged over blocks that look equally wide on the axis.
  is_scaled = end > 10 * first
  space = np.geomspace if is_scaled else np.linspace
  bounds = space(first, end, BLOCKS + 1).round()
  bounds = np.unique(bounds.astype(int))
  # Rounded bounds may coincide if blocks are narrow; `unique` has removed
  # duplicates.
  starts = bounds[:-1]
  centers = (starts + bounds[1:] - 1) / 2

  means = _mean_of_blocks(shown, starts - first)
  _plot(axis, centers, means, color=style.DARK)
  if result["bits_per_dim"] is not None:
    axis.axhline(
      result["bits_per_dim"],
      color=style.GRAY,
      lw=0.8,
      ls="--",
    )

  if is_scaled:
    axis.set_xscale("log", subs=[])  # no minor ticks
    axis.xaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axis.xaxis.set_major_formatter("{x:,.0f}")
  return figure


def bits_by_pixel(
  bits_L: np.ndarray, shape: tuple[int, int, int], result: Mapping[str, Any]
) -> "style.Figure":
  """Plots mean bits by pixel, with a panel for each channel.

  Args:
    bits_L: [rows * columns * channels], mean bits of each position.
    shape: (rows, columns, channels) of the images.
    result: the result that `eval.py` prints.
  """
  channels = shape[2]
  width = max(WIDTH, PANEL * channels + 1)
  figure, axes = style.subplots(1, channels, width, PANEL + 1)
  figure.suptitle(_title(result), fontsize="medium")

  # The scale ignores extremes, because a few pixels, such as the first, would
  # otherwise take up most of the colors.
  low, high = np.nanpercentile(bits_L, (1, 99))
  high = max(high, low + LEAST)
  names = ("red", "green", "blue") if channels == 3 else [""] * channels
  pixels = bits_L.reshape(shape)
  for i, axis in enumerate(axes[0]):
    image = axis.imshow(
      pixels[..., i],
      aspect="auto",
      interpolation="nearest",
      vmin=low,
      vmax=high,
    )
    axis.set(xlabel="column", ylabel="row", title=names[i])

  # All panels share one scale, so that channels can be compared.
  figure.colorbar(
    image,
    ax=list(axes[0]),
    label=result["unit"],
    extend="both",
  )
  return figure


def _title(result):
  """Returns a title with the score, followed by a line for each override."""
  title = "{split}, step {step}, min_context {min_context}".format(**result)
  if result["bits_per_dim"] is not None:
    title += f": {result['bits_per_dim']:.4f}"

  overrides = [f"{k}={v}" for k, v in result["overrides"].items()]
  return "\n".join([title, *overrides])


def _axis(xlabel, ylabel):
  """Returns a figure and its only axes, with integer ticks on the x axis."""
  figure, ((axis,),) = style.subplots(1, 1, WIDTH, HEIGHT)
  axis.set(xlabel=xlabel, ylabel=ylabel)
  style.open_frame(axis)
  axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
  axis.ticklabel_format(axis="x", style="plain", useOffset=False)
  return figure, axis


def _plot(axis, x, y, **look):
  """Draws a curve, or a dot if there is only one point."""
  if np.isfinite(y).sum() == 1:
    look["marker"] = "."
  axis.plot(x, y, **look)


def _mean_of_blocks(values, starts):
  """Computes means over blocks of positions, ignoring NaN.

  Args:
    values: [n], NaN where a position was not scored.
    starts: the first position of each block, increasing integers.

  Returns:
    Means, [blocks]; NaN if all values of a block are NaN.
  """
  known = ~np.isnan(values)
  sums = np.add.reduceat(np.where(known, values, 0), starts)
  counts = np.add.reduceat(known, starts, dtype=int)
  # If nothing is counted, the quotient is not used, but a division by 0 would
  # print a warning.
  return np.where(counts, sums / np.maximum(counts, 1), np.nan)
