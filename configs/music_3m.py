"""Music in sequences of 1,048,576 samples, 3M parameters, strided attention.

Paper row: Child et al. 2019, Table 4, 2.99 bits/sample. The paper states only
the length and the number of parameters, as for music_152m.py.

  python train.py --config=configs/music_3m.py --workdir=runs/music_3m \\
    --config.data.path=FOLDER
  python eval.py --workdir=runs/music_3m --step=best

In the paper: 2.99 bits/sample on the paper's data. We have not trained this
network. It has 2,884,320 parameters.
"""

from configs import music_152m


def get_config():
  config = music_152m.get_config()

  config.data.length = 1_048_576  # paper
  config.data.columns = 1024  # paper: the stride, section 5.3

  config.model.num_layers = 8  # guess: 3M parameters
  config.model.num_heads = 5  # guess: heads of 32, as in music_152m.py
  config.model.width = 160  # guess: 3M parameters

  config.attention.stride = 1024  # guess: the square root of the length
  config.attention.window = 1024  # guess: the stride
  return config
