"""Reads the .npz files of weights that Jun et al. 2020 released.

https://github.com/openai/distribution_augmentation

A file contains four arrays per weight: the raw weight, the averaged weight, and
the two moments of Adam. The authors evaluate the averaged weights. A file does
not record the number of heads or the attention patterns.
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
# A file, and :params for its raw weights instead of the averaged ones.
TEXT = re.compile(r"(.+\.npz)(:params)?")
SOURCE = "cifar10_distaug"  # our data source with their validation images
# The configs of released networks, by the number of layers.
PRESETS = {32: "cifar10_15m", 48: "cifar10_150m", 128: "cifar10_58m"}
# The name of the validation loss, in nats, and its initial value.
LOSS, NO_LOSS = "best_val_loss:0", 99_999
STARTS = "sos_token/"
# {name of a table of start vectors: our name of the order}. Of other tables,
# only row 0 is used.
ORDERS = {
  "sos_rot": "rotation",
  "sos_c": "colors",
  "sos_tr": "transposition",
  "sos_rev": "reverse",
  "sos_js": "jigsaw",
  "sos_rd": "random:4",
}
# The name of an array consists of a layer or table, a part, a leaf of the part,
# and which of the four arrays of the weight it is.
NAME = re.compile(
  r"model/(h\d+/|sos_token/)?(.*?)(/[wbg])?(/Ema/ema|/Adam(?:_1)?|):0"
)
# {name of a part or leaf in the file: our name}.
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
  """Reads the averaged or the raw weights of a file.

  Args:
    text: the name of the file. Append `:params` to read the raw weights, see
      `TEXT`.
    config: the config of the experiment that starts from the weights. If the
      config sets `data.orders`, the arrays include the tables of start vectors.
      Otherwise, they include only the start vector of images without
      augmentation.

  Returns:
    (arrays, provenance). `arrays` is a dict of arrays, keyed by their names in
    our network. `provenance` describes their origin as JSON: `file`, `sha256`,
    `arrays`, the tables of `starts`, and `bits`. `bits` is the score that the
    file records for the authors' validation images. It is included only if the
    config uses these images.

  Raises:
    OSError: the file cannot be read.
    ValueError: the file is damaged, or lacks a layer.
  """
  arrays, starts, provenance = _read(text)
  # The start vector of an image is the sum of one row of each table. Row 0 is
  # for images that are not augmented.
  if config.data.orders:
    for part, rows in starts.items():
      arrays[f"start.{ORDERS.get(part, part)}"] = rows
  elif starts:
    arrays["start"] = sum(rows[0] for rows in starts.values())

  # The score is valid only for the authors' validation images.
  if config.data.name != SOURCE:
    provenance.pop("bits", None)
  return arrays, provenance


def preset(text: str) -> schema.Config:
  """Returns the config in configs/ that matches the network in a file.

  The `data.orders` of the config are the orders with which the network was
  trained.

  Raises:
    OSError, ValueError: see `load`; or no config has this number of layers.
  """
  arrays, starts, _ = _read(text)
  layers = len(arrays.get("blocks.key.bias", ()))
  if layers not in PRESETS:
    raise ValueError(
      f"{text} has {layers} layers, but released networks have"
      f" {', '.join(map(str, PRESETS))}; set its config with --config=FILE"
    )
  # Run the file, because files in configs/ are outside of the package and
  # cannot be imported.
  module = runpy.run_path(f"{version.ROOT}/configs/{PRESETS[layers]}.py")
  # A network has start vectors for the orders with which it was trained.
  orders = [order for name, order in ORDERS.items() if name in starts]
  config = schema.typed(module["get_config"]())
  return config.replace(**{"data.orders": orders})


def with_its_data(config: schema.Config) -> schema.Config:
  """Returns a config that uses the authors' split of CIFAR-10.

  This is necessary because the authors trained on most of our validation
  images. A config of other data is returned unchanged.
  """
  if config.data.name != "cifar10":
    return config
  return config.replace(**{"data.name": SOURCE})


def _read(text):
  """Returns (arrays, start vectors by the names of tables, provenance).

  See `load`. Here, the provenance includes `bits` regardless of the data.
  """
  name, is_raw = TEXT.fullmatch(text).groups()  # type: ignore[union-attr]
  path = files.from_config(name)
  kind = "" if is_raw else "/Ema/ema"
  # This raises ValueError for a pipe, which might never end.
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

      # Reading a file from elsewhere is safe, because NumPy refuses to load
      # pickles, which could run code.
      x = file[name]
      if x.dtype != np.float32 or not np.isfinite(x).all():
        raise ValueError(f"{name} must contain finite float32 numbers")
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
