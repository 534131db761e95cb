"""Makes what docs show of patterns and config fields.

python -m sparse_transformer.figures docs
"""

import pathlib
from collections.abc import Sequence

from sparse_transformer import cli, patterns
from sparse_transformer.figures import gallery
from sparse_transformer.figures.patterns import panels

ROWS, COLUMNS = 12, 12  # an image small enough to see its cells
SHOWN = {
  "dense": "Causal()",
  "local": "Local(12)",
  "strided": "Local(12) | Strided(12)",
  "fixed": "Block(12) | Summary(12, 3)",
  "dilated": "Dilated(8, 4)",
  "BigBird": "BigBird(12, num_random=2)",
  "neighborhood": "Neighborhood(5, 7, columns=12, channels=1)",
}


def main(argv: Sequence[str]) -> None:
  """Writes pictures and tables into the folder of docs."""
  if len(argv) != 2 or not argv[1] or not pathlib.Path(argv[1]).is_dir():
    raise ValueError(
      f"expected one argument, an existing folder of docs, got {argv[1:]}"
    )
  folder = pathlib.Path(argv[1])
  titles = [f"{name}\n{text}" for name, text in SHOWN.items()]
  # Each has one factor, the same in all heads.
  shown = [patterns.parse(text)[0][0] for text in SHOWN.values()]
  figure = panels(titles, shown, (ROWS, COLUMNS), ROWS * COLUMNS)
  figure.savefig(folder / "patterns.png")
  gallery.write(folder)


if __name__ == "__main__":
  cli.run(main)
