"""Copies the samples of a run, and draws its curve, for the README.

python docs/pictures.py runs/digits
"""

import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from sparse_transformer.figures import curves
from sparse_transformer.training import metrics

FOLDER = pathlib.Path(__file__).resolve().parent


def main(workdir: str) -> None:
  shutil.copy(pathlib.Path(workdir) / "samples.png", FOLDER / "samples.png")
  figure = curves.bits_by_step(metrics.read(workdir), "bits/dim")
  figure.savefig(FOLDER / "curve.png")


if __name__ == "__main__":
  main(*sys.argv[1:])
