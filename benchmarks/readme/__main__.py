"""Makes the tables of the README and docs again, from records.

python -m benchmarks.readme [--check]

All come from benchmarks/results: the parts of pages between markers. Those that
differed are listed and, unless --check is given, corrected; the exit status is
then 1.
"""

import re
import sys
from collections.abc import Sequence

from absl import flags

from benchmarks import record
from benchmarks.readme import tables
from sparse_transformer import atomic, cli

BEGIN, END = "<!-- made by make results: {} -->", "<!-- end -->"
PART = re.compile(
  BEGIN.format(r"(\w+)") + r"\n\n(.*?)" + re.escape(END), re.DOTALL
)


def main(argv: Sequence[str]) -> None:
  is_check, differ = flags.FLAGS.check, []
  for name in tables.PARTS:
    path = record.REPO / name
    new, found = made(name, path.read_text())
    differ += found
    if found and not is_check:
      atomic.write_text(path, new)
  for name in differ:
    print(f"{name} differs from the records", file=sys.stderr)
  if differ:
    done = "nothing" if is_check else "all of them"
    raise ValueError(f"{len(differ)} parts differed; corrected: {done}")


def made(name: str, text: str) -> tuple[str, list[str]]:
  """The page with a name, made from its text, and the parts that differed."""
  for other in re.findall(r"benchmarks/results/([\w.-]+\.json)", text):
    if not (record.FOLDER / other).exists():
      raise FileNotFoundError(
        f"{name} names benchmarks/results/{other}, which is missing"
      )
  makers, old = tables.PARTS[name], dict(PART.findall(text))
  if differing := old.keys() ^ makers.keys():
    raise ValueError(
      f"{name} and benchmarks/readme/tables.py have different parts:"
      f" {', '.join(sorted(differing))}"
    )
  new = {}
  for part, make in makers.items():
    texts = [made] if isinstance(made := make(), str) else made
    new[part] = "".join(f"{text.rstrip()}\n\n" for text in texts)
  found = [f"{name}: {part}" for part in makers if new[part] != old[part]]
  return PART.sub(
    lambda part: f"{BEGIN.format(part[1])}\n\n{new[part[1]]}{END}", text
  ), found


if __name__ == "__main__":
  flags.DEFINE_bool("check", False, "Whether to change nothing.")
  cli.run(main)
