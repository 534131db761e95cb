"""Draws the README's curves, of a comparison and a run, and a run's samples.

python docs/pictures.py runs/digits
"""

import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from sparse_transformer import atomic
from sparse_transformer.comparison import record
from sparse_transformer.figures import curves, style
from sparse_transformer.training import metrics

FOLDER = pathlib.Path(__file__).resolve().parent


def main(workdir: str) -> None:
  """Copies the samples of a run, and draws the curves."""
  shutil.copy(pathlib.Path(workdir) / "samples.png", FOLDER / "samples.png")
  figure = curves.bits_by_step(metrics.read(workdir), "bits/dim")
  figure.savefig(FOLDER / "curve.png")
  video = FOLDER.parent / "benchmarks" / "results" / "video_clips.json"
  style.save(record.draw_curves(atomic.read_json(video)), FOLDER / "video.png")


if __name__ == "__main__":
  main(*sys.argv[1:])
