"""Cuts a video into the clips of configs/video.py.

python -m benchmarks.video vtest.avi clips.npy --shrink=4

Writes uint8 [clips, 256, 16]: the gray frames, whose pixels are means of
shrink x shrink, in clips of 16 frames of 16 x 16 pixels, in the order of time.
What is left over at the end, the right and the bottom is dropped. --noise=2
adds a random integer from -2 to 2 to each pixel; --frames=4 makes shorter clips
of the same frames.
"""

import numpy as np
from absl import flags

from benchmarks import baselines
from sparse_transformer import cli

FRAMES, SIDE = 16, 16  # of a clip


def main(argv):
  args = flags.FLAGS
  if len(argv) != 3 or not argv[2].endswith(".npy"):
    raise ValueError("give a video, and the .npy file of clips to write")
  frames = noisy(shrunk(gray(argv[1]), args.shrink), args.noise)
  clips = cut(frames[: len(frames) // FRAMES * FRAMES], args.frames)
  if not len(clips):
    raise ValueError(f"{argv[1]} has {frames.shape}: less than a clip")
  np.save(argv[2], clips)
  print(f"{len(clips):,} clips {clips.shape[1:]} in {argv[2]}")


def gray(path: str) -> np.ndarray:
  """The luma of a video, uint8 [frames, rows, columns]."""
  if (av := baselines.optional("av")) is None:
    raise ValueError(f"{path} needs av to be read")
  with av.open(path) as video:
    return np.stack(
      [x.to_ndarray(format="gray") for x in video.decode(video=0)]
    )


def shrunk(frames: np.ndarray, side: int) -> np.ndarray:
  """Frames whose pixels are rounded means of side x side."""
  number, rows, columns = len(frames), *(x // side for x in frames.shape[1:])
  x = frames[:, : rows * side, : columns * side].astype(np.float32)
  x = x.reshape(number, rows, side, columns, side).mean((2, 4))
  return np.rint(x).astype(np.uint8)


def noisy(frames: np.ndarray, most: int) -> np.ndarray:
  noise = np.random.RandomState(0).randint(-most, most + 1, frames.shape)
  return (frames + noise).clip(0, 255).astype(np.uint8)


def cut(frames: np.ndarray, length: int) -> np.ndarray:
  """Clips of `length` frames, one below the other: [clips, rows, SIDE]."""
  t, r, c = np.array(frames.shape) // (length, SIDE, SIDE)
  x = frames[: t * length, : r * SIDE, : c * SIDE]
  x = x.reshape(t, length, r, SIDE, c, SIDE).transpose(0, 2, 4, 1, 3, 5)
  return x.reshape(-1, length * SIDE, SIDE)


if __name__ == "__main__":
  flags.DEFINE_integer("shrink", 1, "Pixels in a row that are made one.", 1)
  flags.DEFINE_integer("noise", 0, "The largest number to add.", 0, 255)
  flags.DEFINE_integer("frames", FRAMES, "Of a clip.", 1, FRAMES)
  cli.run(main, takes_words=True)
