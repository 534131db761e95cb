"""Runs train.py, which sends itself a signal: python tests/helpers/processes.py
NUMBER STEP FLAGS. The signal comes before the batch of that step of the process
is read; STEP 0 means never.
"""

import os
import pathlib
import runpy
import sys

REPO = pathlib.Path(__file__).parents[2]


def main():
  from sparse_transformer.training.experiment import Experiment

  number, step, *words = sys.argv[1:]
  left = [int(step)]
  read = Experiment.batch

  def batch(*args):
    left[0] -= 1
    if left[0] == 0:
      os.kill(os.getpid(), int(number))
    return read(*args)

  Experiment.batch = batch
  sys.argv = ["train.py", *words]
  runpy.run_path(str(REPO / "train.py"), run_name="__main__")


if __name__ == "__main__":
  main()
