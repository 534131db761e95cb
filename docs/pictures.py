"""Draws the README's curves, of a comparison and a run, and samples of runs.

python docs/pictures.py runs/digits [runs/column runs/window]

The other two are runs on clips, with samples by `sample --num=8 --given=1024`.
"""

import pathlib
import shutil
import sys

from PIL import Image

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from sparse_transformer import atomic
from sparse_transformer.comparison import record
from sparse_transformer.figures import curves, style
from sparse_transformer.training import metrics

FOLDER = pathlib.Path(__file__).resolve().parent


# Samples of clips: the left half of a sheet of samples and real clips, below
# its label, in a size that shows the pixels of frames of 16 x 16.
CLIPS = "clips_column.png", "clips_window.png"
LABEL = 32
WIDTH = 260
ENLARGED = 3


def main(workdir: str, *of_clips: str) -> None:
  """Copies the samples of runs, and draws the curves."""
  shutil.copy(pathlib.Path(workdir) / "samples.png", FOLDER / "samples.png")
  figure = curves.bits_by_step(metrics.read(workdir), "bits/dim")
  figure.savefig(FOLDER / "curve.png")
  for name, run in zip(CLIPS, of_clips, strict=False):
    enlarge(pathlib.Path(run) / "samples.png").save(FOLDER / name)
  video = FOLDER.parent / "benchmarks" / "results" / "video_clips.json"
  style.save(record.draw_curves(atomic.read_json(video)), FOLDER / "video.png")


def enlarge(path: pathlib.Path) -> Image.Image:
  """The left half of a sheet of clips, the samples, with larger pixels."""
  sheet = Image.open(path)
  samples = sheet.crop((0, LABEL, WIDTH, sheet.height))
  size = ENLARGED * samples.width, ENLARGED * samples.height
  return samples.resize(size, Image.Resampling.NEAREST)


if __name__ == "__main__":
  main(*sys.argv[1:])
