"""Video of a fixed camera: clips of 16 gray frames of 16 x 16 pixels.

Paper row: none; 2 merged layers on clips of 4,096 bytes, in which the same
pixel of the frame before is 256 positions back, trained by Muon. data.path is
a .npy file of uint8 [clips, 256, 16], in the order of time: row 16 t + y of a
clip is row y of its frame t. data.fractions are those of 49 stretches of 16
frames, so that no stretch is in two splits. vtest.avi is a sample of OpenCV's.

  python -m benchmarks.video vtest.avi clips.npy --shrink=4
  python train.py --config=configs/video.py --workdir=runs/video \\
    --config.data.path=clips.npy

Expected after 400 steps, mean of 3 seeds: 1.34 bits/dim of the validation
split, and 1.11 on the frames after the first. On these frames, a table of
counts has 0.96 (benchmarks/counts.py), so train for longer.
108,992 parameters.
"""

from configs import cifar10_keys


def get_config():
  config = cifar10_keys.get_config()

  config.data.name = "images"
  config.data.fractions = (36 / 49, 5 / 49, 8 / 49)

  config.attention.pattern = "Local(16) | Strided(256, 1)"
  return config
