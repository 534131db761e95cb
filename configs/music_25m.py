"""Music in sequences of 262,144 samples, 25M parameters, strided attention.

Paper row: Child et al. 2019, Table 4, 2.17 bits/sample. The paper states only
the length and the number of parameters, as for music_152m.py.

  python train.py --config=configs/music_25m.py --workdir=runs/music_25m \\
    --config.data.path=FOLDER
  python eval.py --workdir=runs/music_25m --step=best

In the paper: 2.17 bits/sample on the paper's data. We have not trained this
network. It has 25,151,680 parameters.
"""

from configs import music_152m


def get_config():
  config = music_152m.get_config()

  config.data.length = 262_144  # paper
  config.data.columns = 512  # paper: the stride, section 5.3

  config.model.num_layers = 20  # guess: 25M parameters
  config.model.num_heads = 10  # guess: heads of 32, as in music_152m.py
  config.model.width = 320  # guess: 25M parameters

  config.attention.stride = 512  # guess: the square root of the length
  config.attention.window = 512  # guess: the stride
  return config
