"""Sound from WAV files as 8-bit mu-law at 12 kHz: strided attention.

Paper row: none. This is a small network for a CPU. The paper's network is in
music_152m.py.

  python train.py --config=configs/music.py --workdir=runs/music \\
    --config.data.path=FOLDER
  python eval.py --workdir=runs/music

Expected: 7.37 bits/sample on the test split of 106 seconds of two orchestral
pieces, after 40 steps, 10 of them warm-up. This takes one minute of CPU time on
an AMD EPYC, and only shows that the loss falls. The network has 875,392
parameters.
"""

from configs import text_small


def get_config():
  config = text_small.get_config()

  config.data.name = "audio"
  config.data.length = 4096
  config.data.columns = 64

  config.attention.pattern = "strided"
  config.attention.mode = "interleaved"
  config.attention.stride = 64
  config.attention.window = 64

  config.train.steps = 1500
  config.train.batch_size = 2
  config.eval.batch_size = 4
  config.eval.sequences = 16
  return config
