"""A run of a comparison in one process: train.py, then the score of eval.py.

python sparse_transformer/comparison/run.py train.py --config=... --workdir=...
"""

import pathlib
import runpy
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[2]


def score(argv: Sequence[str]) -> None:
  """Scores the best checkpoint of --workdir on the validation split.

  The process keeps the flags of the run that ended, and JAX, which saves a
  start.
  """
  # After the run: in a process of train.py, these modules are loaded by now.
  from sparse_transformer.cli import flags
  from sparse_transformer.training.evaluation import evaluations

  # What is kept with the score is the command that would give it.
  config, workdir = sys.argv[1:3]
  script = str(ROOT / "eval.py")
  sys.orig_argv = ["python", script, config, workdir, "--split=validation"]
  # Rounding in bfloat16 may be larger than the differences that are compared.
  for made in evaluations.evaluate_run(
    flags.FLAGS.workdir,
    steps=["best"],
    overrides={"model.dtype": "float32"},
    requests=[evaluations.ScoreRequest("validation")],
  ):
    print(made.sentence())


if __name__ == "__main__":
  sys.path[0] = str(ROOT)  # in place of this folder
  sys.argv = sys.argv[1:]
  sys.orig_argv = ["python", *sys.argv]

  # train.py ends by SystemExit, whether or not it succeeds.
  try:
    runpy.run_path(sys.argv[0], run_name="__main__")
  except SystemExit as end:
    if end.code:
      raise
  from sparse_transformer import cli

  # Messages name the command that failed. Its flags are parsed already, since
  # absl keeps them for the process.
  sys.argv[0] = "eval.py"
  cli.run(score, lambda argv: argv[:1])
