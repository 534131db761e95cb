"""Starts a run from the weights of another one."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sparse_transformer import config as config_lib, schema
from sparse_transformer.data import files
from sparse_transformer.training.checkpoints import exported, released, store
from sparse_transformer.training.distributed import processes
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.step import State


def first_state(experiment: Experiment) -> tuple[State, dict[str, Any] | None]:
  """The state before the first step, with the weights of `train.init_from`.

  The parameters and their average become the averaged weights of that run,
  or the weights of that file. The optimizer starts anew.

  Returns:
    (state, what it starts from, as JSON; None if from random weights). There,
    `random` names the parameters that stay random because none fit, `unused`
    the other run's without a place here, `changed` the settings that give all
    another meaning, and `attention` those of the patterns.

  Raises:
    FileNotFoundError: the run has no checkpoint.
    ValueError: it has no such step, its checkpoint is damaged, or parameters do
      not fit, or have another meaning, and `train.init_partial` is False.
  """
  settings = experiment.config.train
  if not settings.init_from:
    return experiment.first_state(), None
  source = _read(settings.init_from, experiment)

  # Arrays of equal shapes may mean something else.
  changed, attention = _changed(source.config, experiment)
  for name, there in source.meanings.items():
    here = getattr(experiment.source, name)
    if there and here and there not in (here, list(here)):
      changed.append(f"{name} of data={here} here, but {there} there")

  state = experiment.first_state()
  params, misfits = _fit(state.params, source.weights, changed, settings)
  start = source.provenance | misfits | dict(attention=attention)
  # The score that a file has is of its own images, and of its own network.
  has_its_images = experiment.config.data.name == released.SOURCE
  if not has_its_images or any(misfits.values()):
    start.pop("bits", None)
  # A copy: the first step is given the memory of both.
  average = jax.tree.map(jnp.copy, params)
  return dataclasses.replace(state, params=params, ema=average), start


@dataclasses.dataclass(frozen=True)
class _Source:
  """Weights to start from, by name, and where they are from."""

  weights: Mapping[str, Any]
  config: schema.Config
  meanings: Mapping[str, Any]  # of symbols and classes, as far as known
  provenance: dict[str, Any]


def _read(text, experiment):
  if text.endswith(exported.SUFFIX):
    path = files.from_config(text)
    file = processes.together(lambda: exported.load(path))
    return _Source(
      weights=store.by_name(file.params),
      config=file.config,
      meanings=dict(symbols=file.source.symbols, classes=file.source.classes),
      provenance=dict(file=text, crc32=f"{files.crc32(path):08x}"),
    )

  if released.TEXT.fullmatch(text):
    weights, provenance = processes.together(
      lambda: released.load(text, experiment.config.data.orders)
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
  """The run and the step in WORKDIR[:STEP]."""
  # The name of a folder may have a colon.
  name, _, asked = text.rpartition(":")
  if not name or files.from_config(text).is_dir():
    name, asked = text, ""
  if files.from_config(name).is_file():
    raise ValueError(
      f"train.init_from={text} must be a run, or a file {exported.SUFFIX} or"
      " .npz"
    )
  run = store.Saved(files.from_config(name))
  try:
    return run, processes.decide(lambda: run.find(asked or None))
  except (FileNotFoundError, ValueError) as error:
    raise type(error)(f"train.init_from={text}: {error}") from error


def _changed(before, experiment):
  """Settings by which weights mean something else, and those of patterns."""
  learned = any(x.is_learned for x in experiment.model.contents)
  changed: list[str] = []
  attention: list[str] = []
  changes = config_lib.compare(before, experiment.config)
  for name, (there, here) in changes.items():
    line = f"{name}={here} here, but {there} there"
    affected = schema.affects(name)
    is_of_model = name.startswith("model.") and affected == "all"
    # Learned parameters of a pattern mean something by it, such as the use of
    # centroids.
    if is_of_model or (name == "attention.pattern" and learned):
      changed.append(line)
    elif affected == "scores":
      attention.append(line)

  return changed, attention


def _fit(params, weights, changed, settings):
  """Parameters with the weights that fit, and the names of what does not."""
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
  # If no array fits, another file was meant.
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
