"""Writes the record of a comparison, for docs.

python -m benchmarks.keep --workdir=runs/long_text

That is the comparison.json of the workdir, without the folders of this machine.
Writes benchmarks/results/NAME.json, where NAME is the name of the workdir.
"""

import pathlib
from collections.abc import Sequence

from absl import flags

from benchmarks import record
from sparse_transformer import cli
from sparse_transformer.comparison import record as comparison_lib


def main(argv: Sequence[str]) -> None:
  cli.check_arguments(argv)
  if not flags.FLAGS.workdir:
    raise ValueError("--workdir must be set; see --help")
  workdir = pathlib.Path(flags.FLAGS.workdir)
  found = comparison_lib.read(workdir / "comparison.json")
  about, data = found["about"], found["about"]["config"]["data"]
  about["command"] = record.without_folders(about["command"])
  data["path"] = record.without_folders(data["path"])
  out = record.FOLDER / f"{workdir.name}.json"
  comparison_lib.write(out, found)
  print(f"record of {about['command']}\nin {out}")


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Folder of the comparison.")
  cli.run(main)
