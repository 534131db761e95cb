"""Cuts a video into the clips of configs/video.py.

python -m benchmarks.video vtest.avi clips.npy --shrink=4

Writes uint8 [clips, 256, 16], in the order of time. Each clip consists of 16
gray frames of 16 x 16 pixels, where a pixel is the mean of shrink x shrink
pixels of the video. Incomplete clips at the end, the right and the bottom are
dropped. --noise=2 adds a random integer from -2 to 2 to each pixel. --frames=4
writes shorter clips of the same frames.
"""

import numpy as np
from absl import flags

from benchmarks import baselines
from sparse_transformer import cli

FRAMES, SIDE = 16, 16  # frames of a clip, and pixels of a side


def main(argv):
  args = flags.FLAGS
  if len(argv) != 3 or not argv[2].endswith(".npy"):
    raise ValueError(
      "give a video, and the .npy file of clips to write; see --help"
    )
  frames = noisy(shrunk(gray(argv[1]), args.shrink), args.noise)
  clips = cut(frames[: len(frames) // FRAMES * FRAMES], args.frames)
  if not len(clips):
    raise ValueError(
      f"{argv[1]} has frames {frames.shape}, less than a clip; use a smaller"
      " --shrink or a longer video"
    )
  np.save(argv[2], clips)
  print(f"{len(clips):,} clips {clips.shape[1:]} in {argv[2]}")


def gray(path: str) -> np.ndarray:
  """Returns the luma of a video, uint8 [frames, rows, columns]."""
  if (av := baselines.optional("av")) is None:
    raise ValueError(f"reading {path} requires av")
  with av.open(path) as video:
    return np.stack(
      [x.to_ndarray(format="gray") for x in video.decode(video=0)]
    )


def shrunk(frames: np.ndarray, side: int) -> np.ndarray:
  """Returns frames whose pixels are rounded means of side x side pixels."""
  number, rows, columns = len(frames), *(x // side for x in frames.shape[1:])
  x = frames[:, : rows * side, : columns * side].astype(np.float32)
  x = x.reshape(number, rows, side, columns, side).mean((2, 4))
  return np.rint(x).astype(np.uint8)


def noisy(frames: np.ndarray, most: int) -> np.ndarray:
  noise = np.random.RandomState(0).randint(-most, most + 1, frames.shape)
  return (frames + noise).clip(0, 255).astype(np.uint8)


def cut(frames: np.ndarray, length: int) -> np.ndarray:
  """Cuts frames into clips of `length` frames below each other.

  Returns uint8 [clips, length * SIDE, SIDE].
  """
  t, r, c = np.array(frames.shape) // (length, SIDE, SIDE)
  x = frames[: t * length, : r * SIDE, : c * SIDE]
  x = x.reshape(t, length, r, SIDE, c, SIDE).transpose(0, 2, 4, 1, 3, 5)
  return x.reshape(-1, length * SIDE, SIDE)


if __name__ == "__main__":
  flags.DEFINE_integer(
    "shrink", 1, "Side of the squares of pixels that become one pixel.", 1
  )
  flags.DEFINE_integer("noise", 0, "Largest random number to add.", 0, 255)
  flags.DEFINE_integer("frames", FRAMES, "Frames per clip.", 1, FRAMES)
  cli.run(main, takes_words=True)
