"""Examples of every registered class of patterns, as expressions.

The laws of patterns, backends, benchmarks and the gallery run over them: a
class that joins the catalogue gets a line here.
"""

from typing import NamedTuple

from sparse_transformer import patterns
from sparse_transformer.patterns import Pattern


class Examples(NamedTuple):
  """Examples of one class."""

  causal: tuple[Pattern, ...]  # for sequences of about 100 positions
  bidirectional: tuple[Pattern, ...]  # the same, where the class has some
  large: Pattern  # for a million positions

  @property
  def small(self):
    """All examples but the large one."""
    return self.causal + self.bidirectional


def read(text):
  """Reads patterns that commas separate; none from an empty text."""
  factors = patterns.parse(text) if text else ()
  return tuple(pattern for (pattern,) in factors)


def of(causal, bidirectional, large):
  """Reads the examples of one class."""
  (one,) = read(large)
  return Examples(read(causal), read(bidirectional), one)


STATIC = {
  name: of(*texts)
  for name, texts in {
    # name: (causal, bidirectional, large)
    "Causal": ("Causal()", "", "Causal()"),
    "Full": ("", "Full()", "Full()"),
    "Local": (
      "Local(17), Local(1)",
      "Local(7, causal=False)",
      "Local(1024)",
    ),
    "Dilated": (
      "Dilated(5, 3)",
      "Dilated(5, 3, causal=False)",
      "Dilated(128, 64)",
    ),
    "Strided": (
      "Strided(12), Strided(12, offset=1)",
      "Strided(12, causal=False)",
      "Strided(1024)",
    ),
    "Block": (
      "Block(20), Block(6, previous=2)",
      "Block(6, previous=1, causal=False)",
      "Block(128, previous=2)",
    ),
    "Summary": (
      "Summary(20, 3), Summary(20, 3, shift=1)",
      "Summary(20, 3, causal=False)",
      "Summary(128, 32)",
    ),
    "LogSparse": ("LogSparse(), LogSparse(5)", "", "LogSparse()"),
    "Global": ("Global(3)", "Global(3, causal=False)", "Global(64)"),
    "RandomBlocks": (
      "RandomBlocks(4, 2), RandomBlocks(3, 3, seed=5, first=1, last=2)",
      "RandomBlocks(4, 2, causal=False)",
      "RandomBlocks(64, 3)",
    ),
    "Longformer": (
      "Longformer(7, 2)",
      "Longformer(7, 2, causal=False)",
      "Longformer(512, 64)",
    ),
    "BigBird": (
      "BigBird(4, num_random=2)",
      "BigBird(4, num_random=2, causal=False)",
      "BigBird(64)",
    ),
    "Row": (
      "Row(4), Row(4, previous=1)",
      "Row(4, causal=False), Row(4, previous=1, causal=False)",
      "Row(64)",
    ),
    "Column": ("Column(4)", "Column(4, causal=False)", "Column(64)"),
    "Neighborhood": (
      "Neighborhood(3, 3, 4)",
      "Neighborhood(3, 3, 4, causal=False)",
      "Neighborhood(9, 9, 64)",
    ),
  }.items()
}

# Of the content-based classes, which the gallery draws.
CONTENT = {
  name: read(text)
  for name, text in {
    "LSH": "LSH(12, 8), Local(6) | LSH(6, 8, rounds=2)",
    "Routing": "Routing(5, 12), Local(6) | Routing(5, 6)",
    "Selected": "Selected(6), Local(6) | Selected(4, 3)",
    "TopBlocks": "TopBlocks(6, 3), Block(6) | TopBlocks(6, 3)",
  }.items()
}
