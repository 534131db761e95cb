"""Weights that Jun et al. 2020 released: .npz, as their code writes them.

https://github.com/openai/distribution_augmentation

A file has each weight four times: as it is, averaged, which they evaluate, and
two moments of Adam. Heads and patterns are not in it.
"""

import hashlib
import math
import os
import re
from collections.abc import Collection
from typing import Any

import numpy as np

from sparse_transformer import atomic
from sparse_transformer.data import files

TEXT = re.compile(r"(.+\.npz)(:params)?")  # a file; its averages, or not
SOURCE = "cifar10_distaug"  # has their validation images
LOSS, NO_LOSS = "best_val_loss:0", 99_999  # in nats; before it is known
STARTS = "sos_token/"
# Their tables of start vectors, and our orders; of others, only row 0 is used.
ORDERS = {"sos_rot": "rotation", "sos_c": "colors", "sos_tr": "transposition"}
ORDERS |= {"sos_rev": "reverse", "sos_js": "jigsaw", "sos_rd": "random:4"}
NAME = re.compile(
  r"model/(h\d+/|sos_token/)?(.*?)(/[wbg])?(/Ema/ema|/Adam(?:_1)?|):0"
)
# Their names of parts, and ours.
OURS = {
  **{"we": "token.embedding", "gen_logits/logits_proj": "logits.kernel"},
  **{f"pos_emb_{i}": f"position.{i}.embedding" for i in range(3)},
  **{"final_norm": "norm", "attn_input": "attention_norm", "mlp": "mlp_norm"},
  **{"q_proj": "query", "k_proj": "key", "v_proj": "value", "post_proj": "out"},
  **{"mlp_proj1": "mlp_in", "mlp_proj2": "mlp_out"},
  **{"/w": ".kernel", "/b": ".bias", "/g": ".scale", "": ""},
}


def load(
  text: str, orders: Collection[str] = ()
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Reads the arrays that a text of the form `TEXT` names, and no others.

  Returns:
    The arrays by their names in our network, with the tables of `data.orders`,
    or for images that are not augmented;
    and, as JSON, where they are from: `file`, `sha256`, `arrays`, the tables of
    `starts`, and `bits`, the file's score of its validation images.

  Raises:
    OSError: the file cannot be read.
    ValueError: it is damaged, or lacks a layer.
  """
  name, params = TEXT.fullmatch(text).groups()  # type: ignore[union-attr]
  path, kind = files.from_config(name), "" if params else "/Ema/ema"
  atomic.size(path)
  found: dict[str, Any] = {}
  layers: dict[str, Any] = {}
  starts: dict[str, Any] = {}
  with files.blame(path), path.open("rb") as opened:
    digest = hashlib.file_digest(opened, "sha256").hexdigest()
    file = np.lib.npyio.NpzFile(opened)
    for name in file:
      match = NAME.fullmatch(os.path.normpath(name))
      if not match or match[4] != kind:
        continue
      x = file[name]  # never a pickle
      if x.dtype != np.float32 or not np.isfinite(x).all():
        raise ValueError(f"{name} must have finite numbers in float32")
      place, part, leaf, _ = match.groups("")
      ours = OURS.get(part, part) + OURS[leaf]
      if place == STARTS:
        starts[part] = x.reshape(-1, x.shape[-1])
      elif place:
        layers.setdefault(f"blocks.{ours}", {})[int(place[1:-1])] = x
      else:
        found[ours] = x
    for ours in [*layers]:
      numbers, of_layers = zip(*sorted(layers.pop(ours).items()), strict=True)
      if numbers != (*range(len(numbers)),):
        raise ValueError(f"it lacks {ours} of a layer")
      found[ours] = np.stack(of_layers)
    nats = file[LOSS].item() if LOSS in file else NO_LOSS
  if orders:
    found |= {f"start.{ORDERS.get(k, k)}": rows for k, rows in starts.items()}
  elif starts:  # row 0: of an image as it is
    found["start"] = sum(rows[0] for rows in starts.values())
  about: dict[str, Any] = dict(file=text, sha256=digest, starts=[*starts])
  about["arrays"] = f"model/*{kind}:0"
  if not params and nats < NO_LOSS:
    about["bits"] = nats / math.log(2)
  return found, about
