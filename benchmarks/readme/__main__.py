"""Makes the README's tables and figures again, and checks its numbers.

python -m benchmarks.readme [--check]

All are made from the records in benchmarks/results, and so are docs/evidence.md
and tables of other pages. What differed is listed; the exit status is then 1.
Tables and figures are corrected, unless --check is given; a number in the text
has to be corrected by hand.
"""

import sys
from collections.abc import Sequence

from absl import flags

from benchmarks import record
from benchmarks.readme import figures, page, tables
from sparse_transformer import atomic, cli

PAGES = *tables.PARTS, "docs/evidence.md"


def main(argv: Sequence[str]) -> None:
  cli.check_arguments(argv)
  is_check, problems = flags.FLAGS.check, []
  for name in PAGES:
    path = record.REPO / name
    old = path.read_text() if path.exists() else ""
    try:
      new, found = page.made(name, old)
    except KeyError as error:
      raise ValueError(
        f"a record that {name} is made from has no field {error}; get it back,"
        " or run the command that writes it again"
      ) from error
    problems += found
    if not is_check and new != old:
      atomic.write_text(path, new)
  for name in figures.outdated():
    problems.append(f"{name} was made from other records")
    if not is_check:
      figures.draw(name)
  for problem in problems:
    print(problem, file=sys.stderr)
  if problems:
    done = "nothing" if is_check else "all but the text"
    raise ValueError(
      f"pages and records differ in {len(problems)} places, listed above;"
      f" {done} has been corrected"
    )


if __name__ == "__main__":
  flags.DEFINE_bool("check", False, "Whether to change nothing.")
  cli.run(main)
