"""Video of a fixed camera: clips of 16 gray frames with 16 x 16 pixels.

Paper row: none. The network has 2 merged layers and is trained with Muon on
clips of 4,096 bytes. In these, the same pixel of the previous frame is 256
positions back.

data.path is a .npy file of uint8 [clips, 256, 16], in the order of time. Row 16
t + y of a clip is row y of frame t of the clip. data.fractions assigns 36, 5
and 8 of 49 stretches of 16 frames to the splits, so that no stretch is in two
splits. vtest.avi is a sample video of OpenCV.

  pip install av
  python -m benchmarks.video vtest.avi clips.npy --shrink=4
  python train.py --config=configs/video.py --workdir=runs/video \\
    --config.data.path=clips.npy

Expected after 400 steps, as the mean of 3 seeds: 1.34 bits/dim on the
validation split, and 1.11 on all frames but the first. On the latter, a table
of counts scores 0.96 (benchmarks/counts.py), so train for longer. The network
has 108,992 parameters.
"""

from configs import cifar10_keys


def get_config():
  config = cifar10_keys.get_config()

  config.data.name = "images"
  config.data.fractions = (36 / 49, 5 / 49, 8 / 49)

  config.attention.pattern = "Local(16) | Strided(256, 1)"
  return config
