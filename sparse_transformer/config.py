"""The config of an experiment: defaults, reading, writing, comparing."""

import json
import os
import pathlib
import sys
from typing import Any

from ml_collections import ConfigDict

from sparse_transformer import atomic

# Fields that affect neither the shapes of the weights nor the order of the
# data: they may change when a run is restarted.
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
  "mesh.",
)


def get_config() -> ConfigDict:
  """Returns the defaults: every field, with its unit and source."""
  config = ConfigDict()

  config.data = ConfigDict(
    dict(
      # digits, cifar10, imagenet64; stdlib, bytes, enwik8, text8, fasta, audio
      name="digits",
      path="",  # file or folder; "": the default place of the data set
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
      width=256,  # width of the residual stream; heads share it
      half_size=False,  # MLP 2 width instead of 4, queries and keys width / 2
      dropout=0.0,  # at the end of the two residual branches only
      init="code",  # "paper": the printed formula, weights 2.83 times smaller
      # Standard deviations of the embeddings with init="code", as in the
      # released code, which uses 0.01 for both for images.
      token_std=0.013,
      position_std=0.007,
      # Of activations: float32, bfloat16, or float16, whose loss is scaled so
      # that gradients neither underflow nor overflow. Parameters and their
      # updates, the residual stream, norms and the loss are float32 anyway.
      dtype="float32",
      # What the backward pass recomputes, from least to most: none, attention,
      # block_but_attention, block.
      remat="block",
      # MLPs of a block with a mixture of experts; 0: no block has one.
      experts=0,
      experts_per_token=2,  # how many of them each position passes through
      experts_every=2,  # every n-th block has experts, the others one MLP
    )
  )

  # Child et al. 2019, sections 4.2 and 4.3.
  config.attention = ConfigDict(
    dict(
      # dense, local, strided, fixed, or an expression over the patterns of
      # sparse_transformer/patterns/: "BigBird(64)", "Local(96) | Global(8)";
      # "Local(96), Strided(96)" are two factors for `mode` to place.
      pattern="strided",
      mode="interleaved",  # factors alternate over layers; or merged, heads
      cycle=(),  # the factors of successive layers; (): 0, 1, ...
      stride=128,  # l, for strided; block size, for fixed
      window=128,  # keys of local, including the query itself
      width=32,  # c, for fixed: summary columns of a block
      num_summaries=1,  # distinct summary columns across heads
      backend="auto",  # dense
      tile=0,  # positions in a tile; 0: chosen from the pattern and the device
    )
  )

  # Factors of the losses that are added to the nats per position in training.
  # Each is a mean over the blocks that have it.
  config.loss = ConfigDict(
    dict(
      load_balance=0.01,  # of experts, 1 if they are used evenly
      router_z=0.001,  # of the router of experts: small logits
      codebook=0.01,  # of Routing: centroids near the queries
      span=1e-6,  # of AdaptiveSpan: the mean span of heads, in positions
    )
  )

  # Child et al. 2019, section 6; betas and epsilon of the released code.
  config.optimizer = ConfigDict(
    dict(
      name="adamw",  # or muon: matrices of the blocks by Muon, the rest by Adam
      learning_rate=0.00035,  # peak
      adam_learning_rate=0.0,  # peak of Muon's Adam; 0: learning_rate
      warmup_steps=5000,  # linear from 0; then cosine to 0 at train.steps
      beta1=0.9,
      beta2=0.999,
      epsilon=1e-8,
      weight_decay=0.01,  # decoupled, times the learning rate; matrices only
      clip_norm=1.0,  # global norm of the gradient
      ema_decay=0.999,  # decay of the averaged weights, used in evaluation
    )
  )

  config.train = ConfigDict(
    dict(
      seed=0,  # seed of weights, data order and dropout
      steps=100_000,  # updates; 0 writes a checkpoint of the initial weights
      batch_size=16,  # sequences of one update, over all devices
      accumulation=1,  # micro-batches per update
      log_every=50,  # steps between lines of metrics
      # A non-finite loss or gradient leaves the weights unchanged. Then: stop,
      # or skip the batch, at most max_skipped times in a row.
      nonfinite="stop",
      max_skipped=10,
      # Log steps whose loss is above this many times the last logged; 0: never.
      spike=1.5,
    )
  )

  config.eval = ConfigDict(
    dict(
      every=2000,  # steps between validations; 0: only after the last
      batch_size=16,  # sequences
      sequences=256,  # validation sequences used during training; 0: all
    )
  )

  config.checkpoint = ConfigDict(
    dict(
      every=2000,  # steps between checkpoints; 0: only after the last
      keep=2,  # number of latest checkpoints to keep
      keep_best=1,  # number to keep of those with the lowest validation loss
      on_error="stop",  # if a checkpoint cannot be written: stop, continue
    )
  )

  # Devices along each axis; -1: those that are left.
  config.mesh = ConfigDict(
    dict(
      data=-1,  # split the batch
      fsdp=1,  # split the batch, the weights and the optimizer's state
      sequence=1,  # split positions
      tensor=1,  # split heads and MLPs
    )
  )

  return config


GROUPS = tuple(get_config())  # the groups of every config


def read_config(workdir: str | os.PathLike) -> ConfigDict:
  """Returns the locked config of a run; newer fields have their defaults.

  Raises:
    FileNotFoundError: the workdir holds no run.
    ValueError: its config.json cannot be read.
  """
  path = pathlib.Path(workdir) / "config.json"
  if not path.exists():
    raise FileNotFoundError(
      f"{workdir} is not a run: it has no config.json; --workdir must name a"
      " folder that train.py wrote"
    )
  settings = atomic.read_json(path)
  try:
    groups = with_defaults(settings)
  except (TypeError, KeyError, AttributeError) as error:
    raise ValueError(
      f"{path} cannot be read: {type(error).__name__}: {error}"
    ) from error
  return ConfigDict(groups).lock()


def with_defaults(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
  """A config that was read as JSON: newer fields have their defaults."""
  defaults = get_config().to_dict()
  settings = {"loss": {}, "mesh": {}} | settings  # newer groups
  return {
    group: defaults.get(group, {}) | _with_tuples(settings[group])
    for group in (*GROUPS, *settings)
  }


def write_config(
  workdir: str | os.PathLike, config: ConfigDict, step: int = 0
) -> None:
  """Writes the config of a run to its workdir.

  Changes to the previous config are appended to config_changes.jsonl, with the
  step from which they apply, and printed on standard error.

  Raises:
    ValueError: see `check_config`.
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


def check_config(workdir: str | os.PathLike, config: ConfigDict) -> None:
  """Raises ValueError if the run in a workdir cannot resume with a config.

  Only `FREE_FIELDS` may differ. A workdir without a run accepts any config.
  """
  _check_changes(workdir, _changes(workdir, config))


def check_saved(
  path: pathlib.Path, saved: dict[str, Any], config: ConfigDict
) -> None:
  """`check_config` against the config in a checkpoint, as read from JSON."""
  try:
    before = ConfigDict(with_defaults(saved))
  except (TypeError, KeyError, AttributeError) as error:
    raise ValueError(
      f"the config in checkpoint {path} cannot be read:"
      f" {type(error).__name__}: {error}"
    ) from error
  _check_changes(f"checkpoint {path}", _differences(before, config))


def _check_changes(
  place: str | os.PathLike, changes: dict[str, tuple[Any, Any]]
) -> None:
  differing = [
    f"{name} ({old!r} there, {new!r} now)"
    for name, (old, new) in changes.items()
    if not name.startswith(FREE_FIELDS)
  ]
  if differing:
    raise ValueError(
      f"{place} is from a run with another config: {', '.join(differing)};"
      " use another --workdir, or the same settings"
    )


def _changes(
  workdir: str | os.PathLike, config: ConfigDict
) -> dict[str, tuple[Any, Any]]:
  """{"group.field": (old, new)} from the config of a workdir to another."""
  if not (pathlib.Path(workdir) / "config.json").exists():
    return {}
  return _differences(read_config(workdir), config)


def _differences(
  before: ConfigDict, after: ConfigDict
) -> dict[str, tuple[Any, Any]]:
  """{"group.field": (old, new)} for the fields that differ."""
  old, new = flatten(before), flatten(after)
  return {
    name: (old.get(name), new.get(name))
    for name in sorted(old.keys() | new.keys())
    if old.get(name) != new.get(name)
  }


def flatten(config: ConfigDict) -> dict[str, Any]:
  """{"group.field": value}, with lists for tuples as in JSON."""
  return {
    f"{group}.{name}": list(value) if isinstance(value, tuple) else value
    for group, fields in config.to_dict().items()
    for name, value in fields.items()
  }


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
  """Restores the tuples that JSON turned into lists."""
  return {
    name: tuple(value) if isinstance(value, list) else value
    for name, value in fields.items()
  }
