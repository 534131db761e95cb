"""Weights in one file that other programs can read: .safetensors.

Layers have separate arrays, such as layers.0.attention.query.kernel;
docs/export.md lists all names. The metadata has the config, the vocabulary, the
unit of losses and the step, so the file suffices.
"""

import json
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
  """Writes weights to a file, completely or not at all.

  Args:
    path: ends in `SUFFIX`.
    config: the experiment's.
    params: the parameters of its network, nested dicts of float32 arrays.
    about: further entries of the metadata, such as the step.

  Raises:
    ValueError: the path has another suffix, or is a folder.
    OSError: the file cannot be written.
  """
  path = check_path(path)
  source = data.source(config.data, config.model.task == "classify")
  leaves = [np.asarray(x) for x in jax.tree.leaves(params)]
  _, places = _places(config, source)
  arrays = {name: leaves[i][layer] for name, (i, layer) in places.items()}
  vocabulary = dict(
    size=source.vocab_size, symbols=source.symbols, separator=source.separator
  )
  vocabulary |= dict(classes=source.classes) if source.classes else {}
  shape = dict(length=source.length, shape=source.shape)
  metadata = {name: str(x) for name, x in about.items()} | dict(
    unit=source.unit,
    vocabulary=json.dumps(vocabulary),
    geometry=json.dumps(shape),
    config=json.dumps(config.to_dict()),
  )
  metadata["crc32"] = _crc32(arrays, metadata)
  with atomic.writing(path) as new, new.open("wb") as file:
    file.write(safetensors.numpy.save(arrays, metadata))
    file.flush()
    os.fsync(file.fileno())  # before the file gets its name


class Exported(NamedTuple):
  """What a file holds."""

  config: schema.Config
  params: dict  # of its network: nested dicts of float32 arrays
  symbols: str  # what they stand for, see `data.Source`


def load(path: str | os.PathLike) -> Exported:
  """Reads weights that `save` wrote.

  Raises:
    ValueError: the file is damaged, or is from another network or program.
    OSError: it cannot be read.
  """
  path = check_path(path)
  atomic.size(path)
  arrays, metadata = _read(path)
  if not {"config", "crc32"} <= metadata.keys():
    raise ValueError(f"{path} is not a file of sparse_transformer.export")
  if metadata.pop("crc32") != _crc32(arrays, metadata):
    raise files.damaged(path, ValueError("its CRC-32 differs"))
  config = config_lib.from_json(json.loads(metadata["config"]), path)
  vocabulary, geometry = (
    json.loads(metadata[name]) for name in ("vocabulary", "geometry")
  )
  source = types.SimpleNamespace(
    vocab_size=vocabulary["size"],
    separator=vocabulary["separator"],
    classes=vocabulary.get("classes", ()),
    **geometry,
  )
  like, places = _places(config, source)  # the data need not be there
  leaves = [np.empty(x.shape, x.dtype) for x in jax.tree.leaves(like)]
  views = {name: leaves[i][layer] for name, (i, layer) in places.items()}
  found, expected = (
    {(name, x.shape, x.dtype) for name, x in given.items()}
    for given in (arrays, views)
  )
  if differing := sorted({name for name, *_ in found ^ expected}):
    raise ValueError(
      f"{path} does not have the arrays of its config:"
      f" {', '.join(differing[:3])} differ; export the run again"
    )
  for name, view in views.items():
    view[...] = arrays[name]
  params = jax.tree.unflatten(jax.tree.structure(like), leaves)
  params = jax.tree.map(jnp.asarray, params)
  return Exported(config, params, vocabulary["symbols"])


def check_path(path: str | os.PathLike) -> pathlib.Path:
  """The path, which must end in `SUFFIX`, and whose folder must exist."""
  path = pathlib.Path(path)
  if path.suffix != SUFFIX:
    raise ValueError(f"{path} must end in {SUFFIX}")
  if path.is_dir():
    raise ValueError(f"{path} is a folder; name a file")
  if not path.parent.is_dir():
    raise ValueError(f"{path.parent} is not a folder; create it first")
  return path


def _places(config, source):
  """(the parameters as shapes, {name: (number of the leaf, layer in it)})."""
  model = model_lib.configure(config, source)
  like = model_lib.param_shapes(model)
  places: dict[str, tuple[int, Any]] = {}
  for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(like)):
    first, *rest = (str(key.key) for key in path)
    if not model_lib.num_stacks(path):
      places[".".join([first, *rest])] = i, ...
      continue
    if first.endswith("blocks"):
      rest[0] = PARTS[rest[0]]
    else:
      rest = ["attention", first, *rest]
    for place, layer in enumerate(model_lib.layers_of(model, first)):
      places[".".join(["layers", str(layer), *rest])] = i, place
  return like, places


def _read(path: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
  """(arrays, metadata) of a file."""
  with files.blame(path), safetensors.safe_open(path, "numpy") as file:
    return {x: file.get_tensor(x) for x in file.keys()}, file.metadata() or {}


def _crc32(arrays: Mapping[str, np.ndarray], metadata: Mapping) -> str:
  """Of all that is in a file: the format does not notice flipped bits."""
  crc = zlib.crc32(json.dumps(dict(metadata), sort_keys=True).encode())
  for name in sorted(arrays):
    crc = zlib.crc32(name.encode(), crc)
    crc = zlib.crc32(np.ascontiguousarray(arrays[name]).data, crc)
  return f"{crc:08x}"
