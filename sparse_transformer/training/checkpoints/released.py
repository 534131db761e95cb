"""Reads weights that Jun et al. 2020 released: .npz, as their code writes them.

https://github.com/openai/distribution_augmentation

A file has each weight four times: as it is, averaged, which they evaluate, and
two moments of Adam. Heads and patterns are not in it.
"""

import hashlib
import math
import os
import re
import runpy
from typing import Any

import numpy as np

from sparse_transformer import atomic, schema, version
from sparse_transformer.data import files

SUFFIX = ".npz"
TEXT = re.compile(r"(.+\.npz)(:params)?")  # a file; its averages, or not
SOURCE = "cifar10_distaug"  # our data source with their validation images
# Configs of their networks, by their numbers of layers.
PRESETS = {32: "cifar10_15m", 48: "cifar10_150m", 128: "cifar10_58m"}
# The name of the loss on these images, in nats; and its value before any.
LOSS, NO_LOSS = "best_val_loss:0", 99_999
STARTS = "sos_token/"
# The names of their tables of start vectors, and of our orders. Of tables that
# are not listed, only row 0 is used.
ORDERS = {
  "sos_rot": "rotation",
  "sos_c": "colors",
  "sos_tr": "transposition",
  "sos_rev": "reverse",
  "sos_js": "jigsaw",
  "sos_rd": "random:4",
}
# The name of an array: its layer or table, its part, which leaf of the part,
# and which of the four copies.
NAME = re.compile(
  r"model/(h\d+/|sos_token/)?(.*?)(/[wbg])?(/Ema/ema|/Adam(?:_1)?|):0"
)
# Their names of parts, and ours.
OURS = {
  "we": "token.embedding",
  "pos_emb_0": "position.0.embedding",
  "pos_emb_1": "position.1.embedding",
  "pos_emb_2": "position.2.embedding",
  "gen_logits/logits_proj": "logits.kernel",
  "final_norm": "norm",
  "attn_input": "attention_norm",
  "q_proj": "query",
  "k_proj": "key",
  "v_proj": "value",
  "post_proj": "out",
  "mlp": "mlp_norm",
  "mlp_proj1": "mlp_in",
  "mlp_proj2": "mlp_out",
  "/w": ".kernel",
  "/b": ".bias",
  "/g": ".scale",
  "": "",
}


def matches(text: str) -> bool:
  """Returns whether `train.init_from` names such a file."""
  return TEXT.fullmatch(text) is not None


def load(
  text: str, config: schema.Config
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Reads the weights of a file, averaged or as they are.

  Args:
    text: names both, in the form `TEXT`.
    config: of the experiment that starts from them. The tables of start vectors
      are read for its `data.orders`; if these are empty, the start is that of
      images that are not augmented.

  Returns:
    (arrays, provenance): the arrays by their names in our network; and, as
    JSON, where they are from: `file`, `sha256`, `arrays`, the tables of
    `starts`, and `bits`, the file's score on its validation images, if the
    config has these.

  Raises:
    OSError: the file cannot be read.
    ValueError: it is damaged, or lacks a layer.
  """
  arrays, starts, provenance = _read(text)
  # Row 0 of each table is that of an image as it is. The start of an image is
  # the sum of a row of each table.
  if config.data.orders:
    for part, rows in starts.items():
      arrays[f"start.{ORDERS.get(part, part)}"] = rows
  elif starts:
    arrays["start"] = sum(rows[0] for rows in starts.values())

  # The score is that of all averages on their own images.
  if config.data.name != SOURCE:
    provenance.pop("bits", None)
  return arrays, provenance


def preset(text: str) -> schema.Config:
  """Returns the config of the network in a file, as far as it is in configs/.

  Its `data.orders` are those that the network was trained with.

  Raises:
    OSError, ValueError: as `load`, or no config has as many layers.
  """
  arrays, starts, _ = _read(text)
  layers = len(arrays.get("blocks.key.bias", ()))
  if layers not in PRESETS:
    raise ValueError(
      f"{text} has {layers} layers, and released networks have"
      f" {', '.join(map(str, PRESETS))}; say which config it has by --config"
    )
  # Files in configs/ are run, not imported: they are outside of the package.
  module = runpy.run_path(f"{version.ROOT}/configs/{PRESETS[layers]}.py")
  # A network has start vectors for the scans that it was trained with.
  orders = [order for name, order in ORDERS.items() if name in starts]
  config = schema.typed(module["get_config"]())
  return config.replace(**{"data.orders": orders})


def with_its_data(config: schema.Config) -> schema.Config:
  """Returns a config with their validation images, if it has CIFAR-10.

  They trained on most of our validation images.
  """
  if config.data.name != "cifar10":
    return config
  return config.replace(**{"data.name": SOURCE})


def _read(text):
  """(arrays, start vectors by their names of tables, provenance): see `load`.

  The provenance has `bits` whichever data they are of.
  """
  name, is_raw = TEXT.fullmatch(text).groups()  # type: ignore[union-attr]
  path = files.from_config(name)
  kind = "" if is_raw else "/Ema/ema"
  # Raises ValueError for a pipe, which would be read for ever.
  atomic.size(path)

  arrays = {}
  layers: dict[str, dict[int, np.ndarray]] = {}  # {name: {layer: array}}
  starts = {}
  with files.blame(path), path.open("rb") as opened:
    digest = hashlib.file_digest(opened, "sha256").hexdigest()
    file = np.lib.npyio.NpzFile(opened)
    for name in file:
      match = NAME.fullmatch(os.path.normpath(name))
      if not match or match[4] != kind:
        continue

      # A file from elsewhere is safe to read: NumPy refuses to load a pickle,
      # which could run code.
      x = file[name]
      if x.dtype != np.float32 or not np.isfinite(x).all():
        raise ValueError(f"{name} must have finite numbers in float32")
      place, part, leaf, _ = match.groups("")
      ours = OURS.get(part, part) + OURS[leaf]
      if place == STARTS:
        starts[part] = x.reshape(-1, x.shape[-1])
      elif place:
        number = int(place[1:-1])
        layers.setdefault(f"blocks.{ours}", {})[number] = x
      else:
        arrays[ours] = x

    for ours, by_number in layers.items():
      if sorted(by_number) != list(range(len(by_number))):
        raise ValueError(f"it lacks {ours} of a layer")
      arrays[ours] = np.stack([by_number[i] for i in range(len(by_number))])
    nats = file[LOSS].item() if LOSS in file else NO_LOSS

  provenance = dict(
    file=text,
    sha256=digest,
    starts=list(starts),
    arrays=f"model/*{kind}:0",
  )
  if not is_raw and nats < NO_LOSS:
    provenance["bits"] = nats / math.log(2)
  return arrays, starts, provenance
