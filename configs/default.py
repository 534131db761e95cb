"""Every field of an experiment, with its unit and source.

Not an experiment of its own: the other files start from this one and change
a few fields. Any field can be set on the command line:
--config.attention.pattern=fixed.
"""

from ml_collections import ConfigDict


def get_config():
  config = ConfigDict()

  config.data = ConfigDict(
    dict(
      # digits, cifar10, imagenet64; stdlib, bytes, enwik8, text8, fasta, audio
      name="digits",
      path="",  # file or folder; "" is the place the data set is put by default
      length=1024,  # positions in a sequence of text; images have their own
      columns=128,  # text is embedded by row and column of a table this wide
      # train, validation, test of stdlib, bytes, fasta, audio
      fractions=(0.9, 0.05, 0.05),
      rate=12_000,  # samples per second of audio; other files are resampled
    )
  )

  config.model = ConfigDict(
    dict(
      num_layers=8,
      num_heads=4,
      width=256,  # of the residual stream; heads share it
      half_size=False,  # MLP 2 width instead of 4, queries and keys width / 2
      dropout=0.0,  # at the end of the two residual branches only
      init="code",  # "paper": read literally, 2.83 times smaller weights
      token_std=0.013,  # of the embeddings with init="code"; the released
      position_std=0.007,  # code's, which has 0.01 and 0.01 for images
      dtype="float32",  # of activations; parameters and loss stay float32
      # Recomputed in the backward pass, from the least to the most: none,
      # attention, block_but_attention, block.
      remat="block",
    )
  )

  # Child et al. 2019, sections 4.2 and 4.3.
  config.attention = ConfigDict(
    dict(
      # dense, local, strided, fixed, or an expression over the patterns of
      # sparse_transformer/patterns.py: "BigBird(64)", "Local(96) | Global(8)";
      # "Local(96), Strided(96)" are two factors for `mode` to place.
      pattern="strided",
      mode="interleaved",  # over layers; merged: one head sees all; heads
      cycle=(),  # factors of the layers in turn; () is 0, 1, ...
      stride=128,  # l of strided; block of fixed
      window=128,  # keys of local, the query itself included
      width=32,  # c: summary columns of a block of fixed
      num_summaries=1,  # distinct summary columns over heads
      backend="auto",  # blocked, dense
      tile=0,  # positions in a tile; 0: chosen from the pattern and the device
    )
  )

  # Child et al. 2019, section 6; betas and epsilon of the released code.
  config.optimizer = ConfigDict(
    dict(
      learning_rate=0.00035,  # peak
      warmup_steps=5000,  # linear from 0; then cosine to 0 at train.steps
      beta1=0.9,
      beta2=0.999,
      epsilon=1e-8,
      weight_decay=0.01,  # of matrices, decoupled, times the learning rate
      clip_norm=1.0,  # global norm of the gradient
      ema_decay=0.999,  # of the weights that evaluation uses
    )
  )

  config.train = ConfigDict(
    dict(
      seed=0,  # of weights, data order and dropout
      steps=100_000,  # updates; 0 writes a checkpoint of the initial weights
      batch_size=16,  # sequences of one update, over all devices
      accumulation=1,  # micro-batches one update is computed in
      log_every=50,  # steps between lines of metrics
      # A loss or gradient that is no number leaves the weights as they are;
      # then: stop, or skip that batch, at most so many times in a row.
      nonfinite="stop",
      max_skipped=10,
      # A loss so many times that of the last line is put down; 0: none is.
      spike=1.5,
    )
  )

  config.eval = ConfigDict(
    dict(
      every=2000,  # steps between validations; 0: only after the last
      batch_size=16,  # sequences at a time
      sequences=256,  # of the validation split during training; 0: all
    )
  )

  config.checkpoint = ConfigDict(
    dict(
      every=2000,  # steps between checkpoints; 0: only after the last
      keep=2,  # the last ones that are kept
      keep_best=1,  # and those of the lowest validation
      on_error="stop",  # when nothing can be written: stop, continue
    )
  )

  return config
