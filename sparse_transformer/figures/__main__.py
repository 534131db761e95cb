"""Draws the picture of patterns in the README.

python -m sparse_transformer.figures docs/patterns.png
"""

from sparse_transformer import cli, patterns as patterns_lib
from sparse_transformer.figures import plots


def main(argv):
  """Draws some patterns, factors merged, at a size one can see."""
  if len(argv) != 2:
    raise ValueError("give one argument: the PNG file to write")
  settings = dict(stride=12, window=12, width=3, num_summaries=1)
  names = ["dense", "local", "strided", "fixed"]
  names += ["Dilated(8, 4)", "BigBird(12, num_random=2)"]
  names += ["Neighborhood(5, 7, columns=12, channels=1)"]
  patterns = [
    patterns_lib.assign(name, "merged", num_layers=1, num_heads=1, **settings)
    for name in names
  ]
  plots.draw(argv[1], names, [p[0][0] for p in patterns], (12, 12), 144)


if __name__ == "__main__":
  cli.run(main)
