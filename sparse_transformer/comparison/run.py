"""Runs train.py, and then scores the run as eval.py would, in one process.

python sparse_transformer/comparison/run.py train.py --config=... --workdir=...
"""

import pathlib
import runpy
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[2]


def score(argv: Sequence[str]) -> None:
  """Scores the best checkpoint of --workdir on the validation split.

  The function uses the flags that train.py has parsed. It runs in the process
  that trained, because JAX is already loaded there.
  """
  # Import these after the run, when train.py has already loaded them.
  from sparse_transformer.cli import flags
  from sparse_transformer.training.evaluation import evaluations

  # Record the command that would give the same score.
  config, workdir = sys.argv[1:3]
  script = str(ROOT / "eval.py")
  sys.orig_argv = ["python", script, config, workdir, "--split=validation"]
  # Score in float32, because rounding errors in bfloat16 may exceed the
  # differences between runs.
  for made in evaluations.evaluate_run(
    flags.FLAGS.workdir,
    steps=["best"],
    overrides={"model.dtype": "float32"},
    requests=[evaluations.ScoreRequest("validation")],
  ):
    print(made.sentence())


if __name__ == "__main__":
  sys.path[0] = str(ROOT)  # replaces the folder of this file
  sys.argv = sys.argv[1:]
  sys.orig_argv = ["python", *sys.argv]

  # train.py always ends with SystemExit, even if it succeeds.
  try:
    runpy.run_path(sys.argv[0], run_name="__main__")
  except SystemExit as end:
    if end.code:
      raise
  from sparse_transformer import cli

  # Error messages should name eval.py. Flags are already parsed, because absl
  # keeps them for the whole process.
  sys.argv[0] = "eval.py"
  cli.run(score, lambda argv: argv[:1])
