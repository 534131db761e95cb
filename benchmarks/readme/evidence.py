"""What comparisons and baselines found: made from the records there are.

A record `NAME.json` in benchmarks/results of which `comparisons` or `contexts`
knows the name adds a section to docs/evidence.md, and a point to the README;
without it there is none.
"""

from benchmarks.readme import baselines, comparisons, contexts, records
from benchmarks.readme.text import wrap

LINK = "[Documentation](README.md)"
KINDS = comparisons, contexts, baselines


def drawn() -> list[str]:
  """The records of which there are figures."""
  names = *comparisons.COMPARISONS, *contexts.CONTEXTS
  return [name for name in names if records.exists(name)]


def section() -> str:
  """The part of the README: a list of points, some with a figure."""
  points = [point for kind in KINDS for point in kind.points()]
  return "\n\n".join(points) + "\n\n"


def page() -> str:
  """docs/evidence.md: all tables and figures, and how each was made."""
  introduction = wrap(
    "`make results` makes this page from the records in `benchmarks/results/`;"
    " do not edit it. A comparison trains the same network with each value of"
    " one field of the config, once per seed."
  )
  parts = [part for kind in KINDS for part in kind.sections()]
  parts = [
    part.strip("\n") for part in ["# Evidence", introduction, *parts, LINK]
  ]
  return "\n\n".join(parts) + "\n"
