"""Bits by training step, and by position."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparse_transformer.figures import style

WIDTH, HEIGHT = 5, 3.2  # inches
PANEL = 2.6  # side of a channel
LEAST = 0.01  # bits between the ends of the colors, so that noise looks flat
BLOCKS = 64  # of positions whose means are drawn
MAX_POINTS = 5000  # of a curve, evenly spaced
Lines = Sequence[Mapping[str, Any]]  # the lines of metrics.jsonl


def bits_by_step(lines: Lines, unit: str) -> "style.Figure":
  """A figure with the curves of a run: training and validation."""
  figure, axis = _axis(xlabel="step", ylabel=unit)
  for split, look in (
    ("train", dict(color=style.LIGHT, lw=0.8)),
    ("validation", dict(color=style.DARK, lw=2, marker=".")),
  ):
    known = [line for line in lines if line["split"] == split]
    # More points than a figure has pixels are not seen, and take seconds.
    known = known[:: -(-len(known) // MAX_POINTS) or 1]
    if known:
      steps, bits = np.array([(x["step"], x["bits_per_dim"]) for x in known]).T
      _plot(axis, steps, bits, label=split, **look)
      axis.legend(frameon=False)
  return figure


def bits_by_position(
  bits_L: np.ndarray, result: Mapping[str, Any]
) -> "style.Figure":
  """A figure of mean bits by position in the window: how context is used.

  Bits are nan where a position was not scored. Positions that only the first
  window scores are left out. The result is what `eval.py` prints.
  """
  first, last = result["min_context"] + 1, len(bits_L)
  shown, scaled = bits_L[first - 1 :], last >= 10 * first
  label = "position in window"
  if first > 1:
    label += f", with at least {first - 1:,} before it"
  figure, axis = _axis(xlabel=label, ylabel=result["unit"])
  axis.set_title(_title(result), fontsize="medium")
  axis.plot(np.arange(first, last + 1), shown, ".", ms=2, color=style.LIGHT)
  # Positions are averaged over blocks that look equally wide.
  space = np.geomspace if scaled else np.linspace
  bounds = np.unique(space(first, last + 1, BLOCKS + 1).round().astype(int))
  centers = (bounds[:-1] + bounds[1:] - 1) / 2
  means = _mean_of_blocks(shown, bounds[:-1] - first)
  _plot(axis, centers, means, color=style.DARK)
  if (bits := result["bits_per_dim"]) is not None:
    axis.axhline(bits, color=style.GRAY, lw=0.8, ls="--")
  if scaled:
    axis.set_xscale("log", subs=[])  # no minor ticks
    axis.xaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axis.xaxis.set_major_formatter("{x:,.0f}")
  return figure


def bits_by_pixel(
  bits_L: np.ndarray, shape: tuple[int, int, int], result: Mapping[str, Any]
) -> "style.Figure":
  """`bits_by_position` of images of a shape, with a panel for each channel."""
  channels = shape[2]
  width = max(WIDTH, PANEL * channels + 1)
  figure, axes = style.subplots(1, channels, width, PANEL + 1)
  figure.suptitle(_title(result), fontsize="medium")
  # A few extremes, such as the first pixel, would take most of the colors.
  low, high = np.nanpercentile(bits_L, (1, 99))
  look = dict(vmin=low, vmax=max(high, low + LEAST), interpolation="nearest")
  names = ("red", "green", "blue") if channels == 3 else [""] * channels
  for i, (axis, name) in enumerate(zip(axes[0], names, strict=True)):
    pixels = bits_L.reshape(shape)[..., i]
    image = axis.imshow(pixels, aspect="auto", **look)
    axis.set(xlabel="column", ylabel="row", title=name)
  figure.colorbar(image, ax=[*axes[0]], label=result["unit"], extend="both")
  return figure


def _title(result):
  title = "{split}, step {step}, min_context {min_context}".format(**result)
  bits, overrides = result["bits_per_dim"], result["overrides"]
  title = title if bits is None else f"{title}: {bits:.4f}"
  return "\n".join([title, *(f"{k}={v}" for k, v in overrides.items())])


def _axis(**labels):
  """A figure, and its only axes, with whole numbers below them."""
  figure, axes = style.subplots(1, 1, WIDTH, HEIGHT)
  axis = axes[0, 0]
  axis.set(**labels)
  axis.spines[["top", "right"]].set_visible(False)
  axis.set_axisbelow(True)
  axis.grid(color=style.GRID, lw=0.6)
  axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
  axis.ticklabel_format(axis="x", style="plain", useOffset=False)
  return figure, axis


def _plot(axis, x, y, **look):
  """Draws a curve; one with a single point is drawn as a dot."""
  if np.isfinite(y).sum() == 1:
    look["marker"] = "."
  axis.plot(x, y, **look)


def _mean_of_blocks(values, starts):
  """Means of blocks, ignoring nan; nan where all values of a block are."""
  known = ~np.isnan(values)
  sums = np.add.reduceat(np.where(known, values, 0), starts)
  counts = np.add.reduceat(known, starts, dtype=int)
  return np.where(counts, sums / np.maximum(counts, 1), np.nan)
