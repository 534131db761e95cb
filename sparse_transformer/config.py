"""The config of an experiment: defaults, reading, writing, comparing."""

import json
import pathlib
import sys

from ml_collections import ConfigDict

from sparse_transformer import atomic

GROUPS = (
  "data",
  "model",
  "attention",
  "optimizer",
  "train",
  "eval",
  "checkpoint",
)
# Fields that neither the weights nor the order of the data depend on.
FREE_FIELDS = (
  "data.path",
  "model.remat",
  "attention.",
  "train.log_every",
  "train.nonfinite",
  "train.max_skipped",
  "train.spike",
  "eval.",
  "checkpoint.",
)


def check_config(workdir, config):
  """Refuses a config with which the run in a workdir cannot go on."""
  differing = [
    f"{name} ({old!r} there, {new!r} now)"
    for name, (old, new) in _changes(workdir, config).items()
    if not name.startswith(FREE_FIELDS)
  ]
  if differing:
    raise ValueError(
      f"{workdir} holds a run of another config: {', '.join(differing)};"
      " use another --workdir, or the same settings"
    )


def write_config(workdir, config, step=0):
  """Puts the config of a run into its workdir.

  What differs from the one before it is put down in config_changes.jsonl, with
  the step from which it holds, and told on standard error.
  """
  check_config(workdir, config)
  path = pathlib.Path(workdir) / "config.json"
  path.parent.mkdir(parents=True, exist_ok=True)
  if changes := _changes(workdir, config):
    with (path.parent / "config_changes.jsonl").open("a") as file:
      file.write(json.dumps({"step": step, "changes": changes}) + "\n")
    for name, (old, new) in changes.items():
      print(f"{name} was {old!r}, is {new!r} from now on", file=sys.stderr)
  atomic.write_text(path, json.dumps(config.to_dict(), indent=2) + "\n")


def _changes(workdir, config):
  """{"group.field": (old, new)} between the config of a workdir and another."""
  if not (pathlib.Path(workdir) / "config.json").exists():
    return {}
  old, new = (_flatten(c) for c in (read_config(workdir), config))
  return {
    name: (old.get(name), new.get(name))
    for name in sorted(old.keys() | new.keys())
    if old.get(name) != new.get(name)
  }


def read_config(workdir):
  """The config of a run, from its workdir alone.

  A field that is younger than the run has its default.
  """
  path = pathlib.Path(workdir) / "config.json"
  if not path.exists():
    raise FileNotFoundError(
      f"{workdir} is no run: it has no config.json; --workdir must name a"
      " folder that train.py wrote"
    )
  try:
    settings = json.loads(path.read_text())
    defaults = get_config().to_dict()
    # JSON has no tuples.
    groups = {
      group: ConfigDict(
        {
          name: tuple(value) if isinstance(value, list) else value
          for name, value in (defaults[group] | settings[group]).items()
        }
      )
      for group in GROUPS
    }
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise ValueError(
      f"{path} cannot be read: {type(error).__name__}: {error}"
    ) from error
  return ConfigDict(groups).lock()


def _flatten(config):
  """{"group.field": value} of a config, with tuples as JSON gives them."""
  return {
    f"{group}.{name}": list(value) if isinstance(value, tuple) else value
    for group, fields in config.to_dict().items()
    for name, value in fields.items()
  }


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
