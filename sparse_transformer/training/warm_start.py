"""Starts a run from the weights of another one."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sparse_transformer import config as config_lib, schema
from sparse_transformer.data import files
from sparse_transformer.training.checkpoints import exported, foreign, store
from sparse_transformer.training.distributed import processes
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.step import State


def first_state(experiment: Experiment) -> tuple[State, dict[str, Any] | None]:
  """Makes the state before the first step, from weights of `train.init_from`.

  Both the parameters and their average become the averaged weights of the run
  that it names, or the weights of the file. The optimizer starts anew.

  Returns:
    (state, start): `start` describes as JSON where the weights are from, and is
    None if they are random. In it, `random` names the parameters for which no
    weights fit, `unused` the weights that have no place here, `changed` the
    settings by which weights mean something else, and `attention` those of the
    patterns that differ.

  Raises:
    FileNotFoundError: the run has no checkpoint.
    ValueError: it has no such step, its checkpoint is damaged, or parameters do
      not fit, or have another meaning, and `train.init_partial` is False.
  """
  settings = experiment.config.train
  if not settings.init_from:
    return experiment.first_state(), None
  source = _read(settings.init_from, experiment)

  # Shapes alone do not say that weights fit: with another vocabulary of the
  # same size, each embedding is that of another symbol.
  changed, attention = _changed(source.config, experiment)
  for name, there in source.meanings.items():
    here = getattr(experiment.source, name)
    # Either may be unknown, and JSON has a list in place of a tuple.
    if there and here and list(there) != list(here):
      changed.append(f"{name} of data={here} here, but {there} there")

  state = experiment.first_state()
  params, misfits = _fit(state.params, source.weights, changed, settings)
  start = source.provenance | misfits | dict(attention=attention)

  # The score in a file is that of all its weights.
  if any(misfits.values()):
    start.pop("bits", None)

  # The average is a copy, because the first step is given the memory of both.
  average = jax.tree.map(jnp.copy, params)
  return dataclasses.replace(state, params=params, ema=average), start


@dataclasses.dataclass(frozen=True)
class _Source:
  """Weights to start from, and what is known about them.

  Attributes:
    weights: {name: array}, see `store.by_name`.
    config: of the experiment that trained them.
    meanings: what its `symbols` and `classes` are, as far as known.
    provenance: where they are from, as JSON.
  """

  weights: Mapping[str, Any]
  config: schema.Config
  meanings: Mapping[str, Any]
  provenance: dict[str, Any]


def _read(text, experiment):
  """Reads what `train.init_from` names: a file, or a run."""
  if text.endswith(exported.SUFFIX):
    path = files.from_config(text)
    file = processes.together(lambda: exported.load(path))
    return _Source(
      weights=store.by_name(file.params),
      config=file.config,
      meanings=dict(symbols=file.source.symbols, classes=file.source.classes),
      provenance=dict(file=text, crc32=f"{files.crc32(path):08x}"),
    )

  if reader := foreign.reader(text):
    weights, provenance = processes.together(
      lambda: reader.load(text, experiment.config)
    )
    return _Source(
      weights=weights,
      config=experiment.config,
      meanings={},
      provenance=provenance,
    )

  run, step = _find(text)
  description = run.describe(step)
  return _Source(
    weights=run.weights(step, experiment.mesh),
    config=run.config(step),
    meanings={x: description[x] for x in ("symbols", "classes")},
    provenance=dict(run=str(run.workdir), run_step=step),
  )


def _find(text: str) -> tuple[store.Saved, int]:
  """Finds the run and the step that WORKDIR[:STEP] names."""
  # The name of a folder may itself have a colon.
  name, _, asked = text.rpartition(":")
  if not name or files.from_config(text).is_dir():
    name, asked = text, ""
  if files.from_config(name).is_file():
    raise ValueError(
      f"train.init_from={text} must be a run, or a file {foreign.SUFFIXES}"
    )

  run = store.Saved(files.from_config(name))
  try:
    return run, processes.decide(lambda: run.find(asked or None))
  except (FileNotFoundError, ValueError) as error:
    raise type(error)(f"train.init_from={text}: {error}") from error


def _changed(before, experiment):
  """The settings that differ from those that the weights were trained with.

  Returns (changed, attention), lines of text: the settings by which weights
  mean something else, and those of patterns, with which they may be used.
  """
  learned = any(x.is_learned for x in experiment.model.contents)
  changed: list[str] = []
  attention: list[str] = []
  changes = config_lib.compare(before, experiment.config)
  for name, (there, here) in changes.items():
    line = f"{name}={here} here, but {there} there"
    affected = schema.affects(name)
    is_of_model = name.startswith("model.") and affected == "all"
    # What a pattern has learned, such as centroids, means nothing to another
    # one.
    if is_of_model or (name == "attention.pattern" and learned):
      changed.append(line)
    elif affected == "scores":
      attention.append(line)

  return changed, attention


def _fit(params, weights, changed, settings):
  """Puts weights in the place of the parameters whose shape they have.

  Returns (parameters, misfits): the names `random` and `unused`, and `changed`.
  Raises ValueError if something does not fit, unless the settings allow it.
  """
  leaves = store.by_name(params)
  fitted = dict(leaves)
  reasons = {}
  for name, x in leaves.items():
    there = list(weights[name].shape) if name in weights else "absent"
    if there == list(x.shape):
      fitted[name] = jax.device_put(weights[name], x.sharding)
    else:
      reasons[name] = f"{name} is {there} there and {list(x.shape)} here"
  unused = [name for name in weights if name not in leaves]

  problems = changed + list(reasons.values())
  problems += [f"{name} is absent here" for name in unused]
  # Even a partial start needs something: if no array fits, the user must have
  # meant another file.
  none_fits = len(reasons) == len(leaves)
  if problems and (not settings.init_partial or none_fits):
    raise ValueError(
      f"train.init_from={settings.init_from} is another network:"
      f" {', '.join(problems[:4])}; use the same settings of the model, the"
      " data's symbols and length and the patterns' parameters, or"
      " --config.train.init_partial=True, which takes the weights that fit"
    )
  misfits = dict(random=list(reasons), unused=unused, changed=changed)
  tree = jax.tree.structure(params)
  return jax.tree.unflatten(tree, fitted.values()), misfits
