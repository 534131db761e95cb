"""Curves of bits and throughput by training step, and of bits by position."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_transformer.figures import style

if TYPE_CHECKING:
  from matplotlib.figure import Figure

Lines = Sequence[Mapping[str, Any]]  # the lines of metrics.jsonl


def bits_by_step(runs: Mapping[str, Lines], unit: str) -> "Figure":
  """A figure with two curves for each named run: training and validation."""
  figure, axis = _axis(7, 4)
  styles: dict[str, dict[str, Any]] = {
    "train": dict(lw=0.8, alpha=0.6),
    "validation": dict(lw=2, marker="."),
  }
  for i, (name, lines) in enumerate(runs.items()):
    for split, look in styles.items():
      of_split = [line for line in lines if line["split"] == split]
      if of_split:
        steps, bits = _columns(of_split, "bits_per_dim")
        label = f"{name} {split}".strip()
        axis.plot(steps, bits, color=f"C{i}", label=label, **look)
  axis.set(xlabel="step", ylabel=unit)
  axis.legend(frameon=False, fontsize=8)
  figure.tight_layout()
  return figure


def throughput_by_step(lines: Lines) -> "Figure":
  """A figure of tokens per second."""
  figure, axis = _axis(7, 2.4)
  axis.plot(*_columns(lines, "tokens_per_second"), color=style.DARK, lw=1)
  axis.set(xlabel="step", ylabel="tokens per second", ylim=(0, None))
  figure.tight_layout()
  return figure


def save_positions(
  path: str | os.PathLike, bits_L: np.ndarray, result: Mapping[str, Any]
) -> None:
  """Draws mean bits by position in the window, to show how context is used.

  Args:
    path: path of the PNG file.
    bits_L: mean bits, nan where a position was not scored.
    result: the object that `eval.py` prints.
  """
  places_L = 1 + np.arange(len(bits_L))
  figure, axis = _axis(7, 3.6)
  axis.plot(places_L, bits_L, ".", ms=2, color=style.LIGHT)
  width = max(1, len(bits_L) // 64)
  means = _mean_of_blocks(bits_L, width)
  centers = np.arange(len(means)) * width + (1 + width) / 2
  axis.plot(centers, means, color=style.DARK)
  axis.axhline(result["bits_per_dim"], color=style.GRAY, lw=0.8, ls="--")
  title = "{split}, step {step}, min_context {min_context}: {bits_per_dim:.4f}"
  axis.set_title(title.format(**result), fontsize=10)
  axis.set(xscale="log", xlabel="position in window", ylabel=result["unit"])
  figure.tight_layout()
  figure.savefig(path)


def _axis(width, height):
  figure, axes = style.subplots(1, 1, width, height)
  axis = axes[0, 0]
  axis.spines[["top", "right"]].set_visible(False)
  axis.set_axisbelow(True)
  axis.grid(color=style.GRID, lw=0.6)
  return figure, axis


def _columns(lines, field):
  """The steps of the lines that have a field, and its values."""
  known = [line for line in lines if field in line]
  return [line["step"] for line in known], [line[field] for line in known]


def _mean_of_blocks(values, size):
  """Means over blocks of `size`, ignoring nan; nan where all values are."""
  starts = np.arange(0, len(values), size)
  known = ~np.isnan(values)
  sums = np.add.reduceat(np.where(known, values, 0), starts)
  counts = np.add.reduceat(known, starts, dtype=int)
  return np.where(counts, sums / np.maximum(counts, 1), np.nan)
