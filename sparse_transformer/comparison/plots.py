"""The figure of a comparison: bits against time, tokens and steps."""

import typing

from sparse_transformer.comparison import record as record_lib
from sparse_transformer.comparison.record import Record
from sparse_transformer.figures import style

if typing.TYPE_CHECKING:
  from matplotlib.figure import Figure

WIDTH, HEIGHT = 3.4, 3.4  # of a panel, in inches
MAX_LABEL = 26  # characters of a choice
LETTER = 0.08  # width of one, in inches
MARKERS = "os^Dv<>"  # at the end of a line, as a second way to tell them apart


def draw(record: Record) -> "Figure":
  """Validation bits during training, a line for each choice.

  A line is the mean over the seeds; around it, a band from the lowest to the
  highest. There is a panel for each of `record.axes`; tokens are above steps
  where all steps have the same number.

  Args:
    record: see `record`; nothing else is read.
  """
  names = [_shorten(choice) for choice in record["about"]["choices"]]
  axes = record_lib.axes(record)
  width = WIDTH * len(axes) + LETTER * (5 + max(map(len, names)))
  height = max(HEIGHT, 0.22 * len(names))
  figure, grid = style.subplots(1, len(axes), width, height)
  figure.set_layout_engine("constrained")
  for axis, panel in zip(axes, grid[0], strict=True):
    _draw_panel(panel, record, axis)
  low = min(panel.get_ylim()[0] for panel in grid[0])
  high = max(panel.get_ylim()[1] for panel in grid[0])
  for panel in grid[0]:
    panel.set_ylim(low, high)
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
