"""Files of weights that other programs can read, see docs/export.md."""

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
# The parts of a block: {name in the network: name in a file}.
PARTS = {
  "attention_norm": "attention.norm",
  "query": "attention.query",
  "key": "attention.key",
  "value": "attention.value",
  "out": "attention.out",
  "mlp_norm": "mlp.norm",
  "mlp_in": "mlp.in",
  "mlp_out": "mlp.out",
  "router": "mlp.router",
  "experts_in": "mlp.experts_in",
  "experts_out": "mlp.experts_out",
}


def save(
  path: str | os.PathLike,
  config: schema.Config,
  params: dict,
  **provenance: object,
) -> None:
  """Writes the parameters of an experiment's network to a file.

  Args:
    path: the path of the file, NAME.safetensors.
    config: the config of the experiment. Fields that depend on this machine are
      not stored, see `config.portable`.
    params: the parameters of the network.
    **provenance: additional metadata, such as the step.

  Raises:
    ValueError: the path is unsuitable.
    OSError: the file cannot be written.
  """
  path = check_path(path)
  source = data.source(config.data)
  model = model_lib.configure(config, source)
  arrays = _by_layer(model, jax.tree.map(np.asarray, params))
  metadata = {name: str(x) for name, x in provenance.items()}
  metadata["unit"] = source.unit
  metadata["vocabulary"] = json.dumps(
    dict(
      size=source.vocab_size,
      symbols=source.symbols,
      separator=source.separator,
      classes=source.classes,
    )
  )
  metadata["geometry"] = json.dumps(
    dict(length=source.length, shape=source.shape)
  )
  # A file may be published, so it must not contain paths of this machine.
  portable = config_lib.portable(schema.typed(config))
  metadata["config"] = json.dumps(portable.to_dict())
  metadata["crc32"] = _crc32(arrays, metadata)
  atomic.write_bytes(path, safetensors.numpy.save(arrays, metadata))


class Exported(NamedTuple):
  """The contents of a file of weights.

  Attributes:
    config: the config of the experiment, without paths and devices.
    params: the parameters of the network, nested dicts of float32 arrays.
    source: a stand-in for the `data.Source`, with its symbols and its shape but
      without examples.
  """

  config: schema.Config
  params: dict
  source: Any


def load(path: str | os.PathLike) -> Exported:
  """Reads weights that `save` wrote.

  If the CRC-32 of the contents differs from the recorded one, prints a warning
  on standard error. The file is then damaged, or another program has modified
  it.

  Args:
    path: the path of the file.

  Raises ValueError if the file is damaged, or lacks metadata or arrays that
  `save` writes.
  """
  path = pathlib.Path(path)
  # Weights need memory twice: as arrays of the file, and as arrays of the
  # network.
  machine.check_free(f"to read {path}", 2 * atomic.size(path))
  try:
    with safetensors.safe_open(path, "numpy") as file:
      kinds = {x: file.get_slice(x).get_dtype() for x in file.keys()}
      if wrong := [x for x, kind in kinds.items() if kind != "F32"]:
        raise ValueError(f"{path}: {', '.join(wrong[:3])} must be float32")
      arrays = {x: file.get_tensor(x) for x in kinds}
      metadata = file.metadata() or {}
  except safetensors.SafetensorError as error:
    raise ValueError(
      f"{path} is damaged or truncated: {error}; copy or download it again"
    ) from error

  if not {"config", "vocabulary", "geometry"} <= metadata.keys():
    raise ValueError(
      f"{path} is not a file of sparse_transformer.export, or another program"
      " has removed its metadata; use the exported file"
    )
  if metadata.pop("crc32", None) != _crc32(arrays, metadata):
    files.warn(
      f"the CRC-32 of {path} differs from the exported one; unless another"
      " program has changed the file, it is damaged"
    )

  try:
    # The metadata replace the data, which need not be on this machine.
    config, source = _described(metadata)
    model = model_lib.configure(config, source)
    shapes = model_lib.param_shapes(model)
  # Catch any error, because another program may have written anything.
  except Exception as error:
    raise ValueError(f"{path} cannot be read: {error}") from error

  # A file contains one array per layer, whereas the network stacks all layers
  # in one array. Allocate the stacked arrays, and fill them through views of
  # single layers.
  params = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes)
  views = _by_layer(model, params)
  here = {(name, x.shape) for name, x in views.items()}
  there = {(name, x.shape) for name, x in arrays.items()}
  if differing := sorted({name for name, _ in here ^ there}):
    raise ValueError(
      f"the arrays in {path} do not match its config:"
      f" {', '.join(differing[:3])} differ; export the run again"
    )
  for name, view in views.items():
    view[...] = arrays[name]

  return Exported(config, jax.tree.map(jnp.asarray, params), source)


def _crc32(arrays: Mapping[str, np.ndarray], metadata: Mapping) -> str:
  """Returns the CRC-32 of a file's contents, to detect flipped bits.

  The format itself has no checksum. The CRC-32 does not depend on the order in
  which a program writes arrays and metadata.
  """
  text = json.dumps(dict(metadata), sort_keys=True)
  crc = zlib.crc32(text.encode())
  for name in sorted(arrays):
    crc = zlib.crc32(name.encode(), crc)
    crc = zlib.crc32(np.ascontiguousarray(arrays[name]).data, crc)
  return f"{crc:08x}"


def _described(metadata):
  """Returns (config, stand-in for the data source) from a file's metadata."""
  settings = json.loads(metadata["config"])
  config = config_lib.portable(config_lib.from_json(settings, "the config"))
  vocabulary = json.loads(metadata["vocabulary"])
  geometry = json.loads(metadata["geometry"])
  length = geometry["length"]
  shape = geometry["shape"]
  if length not in (config.data.length, math.prod(shape)):
    raise ValueError(f"{length=} differs from the length in the config")

  source = types.SimpleNamespace(
    length=length,
    shape=shape,
    vocab_size=vocabulary["size"],
    symbols=vocabulary["symbols"],
    separator=vocabulary["separator"],
    classes=vocabulary.get("classes", ()),
    arrangement=data.arrangements.of(config.data.orders, shape),
  )
  return config, source


def check_path(path: str | os.PathLike) -> pathlib.Path:
  """Returns a path, or raises ValueError if no file can be exported to it."""
  path = pathlib.Path(path)
  if path.suffix != SUFFIX or path.is_dir() or not path.parent.is_dir():
    raise ValueError(
      f"{path} must be a file NAME{SUFFIX} in a folder that exists"
    )
  return path


def _by_layer(model: model_lib.Config, params: dict) -> dict[str, np.ndarray]:
  """Returns {name in a file: view of the array of a single layer}.

  Args:
    model: the config of the network.
    params: its parameters, whose arrays stack layers of the same kind.
  """
  views = {}
  for path, x in jax.tree_util.tree_leaves_with_path(params):
    keys = [str(key.key) for key in path]
    first = keys[0]
    if not model_lib.num_stacks(path):
      views[".".join(keys)] = x
      continue

    # Outside of blocks, only options of attention have arrays per layer.
    name = ".".join(["attention"] + keys)
    if first.endswith("blocks"):
      name = ".".join([PARTS[keys[1]]] + keys[2:])
    for place, layer in enumerate(model_lib.layers_of(model, first)):
      views[f"layers.{layer}.{name}"] = x[place, ...]

  return views
