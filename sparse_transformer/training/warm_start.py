"""Starts a run from the weights of another run or of a file."""

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
  """Returns the state before the first step, as `train.init_from` sets it.

  If `train.init_from` names a run, both the parameters and their average become
  the averaged weights of that run. If it names a file, they become the weights
  in the file. The state of the optimizer is new in either case.

  Returns:
    (state, start). `start` describes the origin of the weights as JSON, and is
    None if the weights are random. `start` includes four lists: `random`, the
    parameters that no weights fit; `unused`, the weights that fit no parameter;
    `changed`, the settings that change the meaning of weights; and `attention`,
    the pattern settings that differ.

  Raises:
    FileNotFoundError: the run has no checkpoint.
    ValueError: the run does not have this step, or its checkpoint is damaged.
      If `train.init_partial` is False, also if weights do not fit or have
      another meaning.
  """
  settings = experiment.config.train
  if not settings.init_from:
    return experiment.first_state(), None
  source = _read(settings.init_from, experiment)

  # Weights may not fit even if shapes are equal: with a different vocabulary of
  # the same size, each embedding belongs to a different symbol.
  changed, attention = _changed(source.config, experiment)
  for name, there in source.meanings.items():
    here = getattr(experiment.source, name)
    # Either may be unknown. Compare lists, because JSON has no tuples.
    if there and here and list(there) != list(here):
      changed.append(f"{name} of data={here} here, but {there} there")

  state = experiment.first_state()
  params, misfits = _fit(state.params, source.weights, changed, settings)
  start = source.provenance | misfits | dict(attention=attention)

  # The score in a file is valid only if all its weights are used.
  if any(misfits.values()):
    start.pop("bits", None)

  # Copy the average, because the first step reuses the memory of both.
  average = jax.tree.map(jnp.copy, params)
  return dataclasses.replace(state, params=params, ema=average), start


@dataclasses.dataclass(frozen=True)
class _Source:
  """Weights from which a run starts, and what is known about them.

  Attributes:
    weights: {name: array}, see `store.by_name`.
    config: the config of the experiment that trained the weights.
    meanings: the `symbols` and `classes` of that experiment, as far as known.
    provenance: the origin of the weights, as JSON.
  """

  weights: Mapping[str, Any]
  config: schema.Config
  meanings: Mapping[str, Any]
  provenance: dict[str, Any]


def _read(text, experiment):
  """Reads the file or the run that `train.init_from` names."""
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
  """Returns the run and the step that WORKDIR[:STEP] names."""
  # The name of a folder may itself contain a colon.
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
  """Finds settings that differ from those with which weights were trained.

  Returns:
    (changed, attention), two lists of lines. `changed` lists the settings that
    change the meaning of weights. `attention` lists the pattern settings that
    differ but still allow the weights to be used.
  """
  learned = any(x.is_learned for x in experiment.model.contents)
  changed: list[str] = []
  attention: list[str] = []
  changes = config_lib.compare(before, experiment.config)
  for name, (there, here) in changes.items():
    line = f"{name}={here} here, but {there} there"
    affected = schema.affects(name)
    is_of_model = name.startswith("model.") and affected == "all"
    # Learned parameters of a pattern, such as centroids, mean nothing to
    # another pattern.
    if is_of_model or (name == "attention.pattern" and learned):
      changed.append(line)
    elif affected == "scores":
      attention.append(line)

  return changed, attention


def _fit(params, weights, changed, settings):
  """Replaces parameters by the weights of the same name and shape.

  Returns:
    (parameters, misfits). `misfits` is a dict of `random` and `unused`, two
    lists of names, and of `changed`.

  Raises ValueError if something does not fit, unless `train.init_partial` is
  True and at least one array fits.
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
  # If no array fits, the user must have meant another file, so raise an error
  # even if a partial start is allowed.
  none_fits = len(reasons) == len(leaves)
  if problems and (not settings.init_partial or none_fits):
    raise ValueError(
      f"train.init_from={settings.init_from} is another network:"
      f" {', '.join(problems[:4])}; use the same model settings, data symbols,"
      " sequence length and patterns, or set --config.train.init_partial=True,"
      " to use only the weights that fit"
    )
  misfits = dict(random=list(reasons), unused=unused, changed=changed)
  tree = jax.tree.structure(params)
  return jax.tree.unflatten(tree, fitted.values()), misfits
