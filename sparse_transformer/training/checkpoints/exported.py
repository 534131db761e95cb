"""Weights in one file that other programs can read: docs/export.md."""

import json
import math
import os
import pathlib
import types
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from sparse_transformer import (
  atomic,
  config as config_lib,
  data,
  machine,
  model as model_lib,
  schema,
)
from sparse_transformer.data import files

SUFFIX = ".safetensors"
# The parts of a block: their names in the network, and in a file.
PARTS = {"attention_norm": "attention.norm"}
PARTS |= {x: f"attention.{x}" for x in ("query", "key", "value", "out")}
PARTS |= {f"mlp_{x}": f"mlp.{x}" for x in ("norm", "in", "out")}
PARTS |= {x: f"mlp.{x}" for x in ("router", "experts_in", "experts_out")}


def save(
  path: str | os.PathLike, config: schema.Config, params: dict, **about: object
) -> None:
  """Writes the parameters of an experiment's network to a file.

  `about` is added to the metadata, such as the step. The config is stored
  without what only this machine has, see `config.portable`.
  """
  path = check_path(path)
  source = data.source(config.data, config.model.task == "classify")
  model = model_lib.configure(config, source)
  arrays = _by_layer(model, jax.tree.map(np.asarray, params))
  vocabulary = dict(
    size=source.vocab_size,
    symbols=source.symbols,
    separator=source.separator,
    classes=source.classes,
  )
  metadata = {name: str(x) for name, x in about.items()} | dict(
    unit=source.unit,
    vocabulary=json.dumps(vocabulary),
    geometry=json.dumps(dict(length=source.length, shape=source.shape)),
    config=json.dumps(config_lib.portable(schema.typed(config)).to_dict()),
  )
  metadata["crc32"] = _crc32(arrays, metadata)
  atomic.write_bytes(path, safetensors.numpy.save(arrays, metadata))


class Exported(NamedTuple):
  """What a file holds."""

  config: schema.Config  # without paths
  params: dict  # of its network: nested dicts of float32 arrays
  source: Any  # what is known of the `data.Source`, which has no examples


def load(path: str | os.PathLike) -> Exported:
  """Reads weights that `save` wrote, or another program has saved again.

  If their CRC-32 differs, a line on standard error says so. Raises ValueError
  if the file is damaged, or lacks the metadata or arrays that `save` writes.
  """
  path = pathlib.Path(path)
  machine.check_free(f"to read {path}", 2 * atomic.size(path))
  try:
    with safetensors.safe_open(path, "numpy") as file:
      kinds = {x: file.get_slice(x).get_dtype() for x in file.keys()}
      if others := [x for x, kind in kinds.items() if kind != "F32"]:
        raise ValueError(f"{path}: {', '.join(others[:3])} must be float32")
      arrays = {x: file.get_tensor(x) for x in kinds}
      metadata = file.metadata() or {}
  except safetensors.SafetensorError as error:
    raise ValueError(
      f"{path} is damaged or truncated: {error}; get it again"
    ) from error
  if not {"config", "vocabulary", "geometry"} <= metadata.keys():
    raise ValueError(
      f"{path} is not a file of sparse_transformer.export, or was saved again"
      " without its metadata; get the exported one"
    )
  if metadata.pop("crc32", None) != _crc32(arrays, metadata):
    files.tell(
      f"warning: {path} is not as exported: its CRC-32 differs. Unless a"
      " program has changed it, it is damaged"
    )
  try:
    config, vocabulary, geometry = (
      json.loads(metadata[x]) for x in ("config", "vocabulary", "geometry")
    )
    config = config_lib.portable(config_lib.from_json(config, "the config"))
    about = types.SimpleNamespace(**dict(classes=()) | vocabulary, **geometry)
    about.vocab_size = about.size
    about.orders = data.Orders(config.data.orders, tuple(about.shape))
    if about.length not in (config.data.length, math.prod(about.shape)):
      raise ValueError(f"length={about.length} is not that of the config")
    model = model_lib.configure(config, about)  # the data need not be there
    shapes = model_lib.param_shapes(model)
  except Exception as error:  # they may be anything
    raise ValueError(f"{path} cannot be read: {error}") from error
  # Each layer is a view of an array that is still empty.
  params = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes)
  views = _by_layer(model, params)
  expected, found = (
    {(k, x.shape) for k, x in y.items()} for y in (views, arrays)
  )
  if differing := sorted({name for name, _ in found ^ expected}):
    raise ValueError(
      f"{path} does not have the arrays of its config:"
      f" {', '.join(differing[:3])} differ; export the run again"
    )
  for name, view in views.items():
    view[...] = arrays[name]
  params = jax.tree.map(jnp.asarray, params)
  return Exported(config, params, about)


def check_path(path: str | os.PathLike) -> pathlib.Path:
  """The path of a new file; raises ValueError unless it can be one."""
  path = pathlib.Path(path)
  if path.suffix != SUFFIX or path.is_dir() or not path.parent.is_dir():
    raise ValueError(f"{path} must be a file {SUFFIX} in a folder that exists")
  return path


def _by_layer(model: model_lib.Config, params: dict) -> dict[str, np.ndarray]:
  """Views of arrays that stack layers, by their names in a file."""
  views = {}
  for path, x in jax.tree_util.tree_leaves_with_path(params):
    first, *rest = (str(key.key) for key in path)
    if not model_lib.num_stacks(path):
      views[".".join([first, *rest])] = x
      continue
    if first.endswith("blocks"):
      rest[0] = PARTS[rest[0]]
    else:
      rest = ["attention", first, *rest]
    for place, layer in enumerate(model_lib.layers_of(model, first)):
      views[".".join(["layers", str(layer), *rest])] = x[place, ...]
  return views


def _crc32(arrays: Mapping[str, np.ndarray], metadata: Mapping) -> str:
  """CRC-32 of a file's contents: the format does not notice flipped bits."""
  crc = zlib.crc32(json.dumps(dict(metadata), sort_keys=True).encode())
  for name in sorted(arrays):
    crc = zlib.crc32(name.encode(), crc)
    crc = zlib.crc32(np.ascontiguousarray(arrays[name]).data, crc)
  return f"{crc:08x}"
