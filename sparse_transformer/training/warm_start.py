"""Starts a run from the weights of another one."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from sparse_transformer import config as config_lib, schema
from sparse_transformer.data import files
from sparse_transformer.training.checkpoints import (
  exported,
  saved_arrays,
  store,
)
from sparse_transformer.training.distributed import processes
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.step import State

# Fields of `model` on which the function of the weights does not depend.
MEANINGLESS = "dropout", "token_std", "position_std", "dtype", "remat"


def first_state(experiment: Experiment) -> tuple[State, dict[str, Any] | None]:
  """The state before the first step, with the weights of `train.init_from`.

  The parameters and their average become the averaged weights of that run, or
  those of an exported file. The optimizer starts anew. Patterns and data may be
  others, as long as the parameters and symbols mean the same.

  Returns:
    (state, what it starts from, as JSON; None if from random weights). There,
    `random` names the parameters that stay random as there are none that fit,
    `unused` those of the other run that have no place here, and `changed` what
    gives all of them another meaning.

  Raises:
    FileNotFoundError: the run has no checkpoint.
    ValueError: it has no such step, its checkpoint is damaged, or parameters do
      not fit, or have another meaning, and `train.init_partial` is False.
  """
  state, text = experiment.first_state(), experiment.config.train.init_from
  if not text:
    return state, None
  if text.endswith(exported.SUFFIX):
    path = files.from_config(text)
    weights = processes.together(lambda: exported.load(path))
    found = saved_arrays.by_name(weights.params)
    changed = _changed(experiment, weights.config, weights.symbols)
    about: dict[str, Any] = dict(file=text, crc32=f"{files.crc32(path):08x}")
  else:
    workdir, asked = _parse(text)
    run = store.Checkpoints(workdir)
    step = processes.decide(lambda: _find(run, asked, text))
    found = run.weights(step, experiment.mesh)
    other = processes.decide(lambda: run.describe(step))
    config = config_lib.from_json(
      other.get("config", {}), f"the config in {text}"
    )
    changed = _changed(experiment, config, other.get("symbols"))
    fingerprint = processes.decide(lambda: run.fingerprint(step))
    about = dict(run=str(run.workdir), run_step=step, crc32=fingerprint)
  settings = experiment.config.train
  params, misfits = _fit(state.params, found, changed, settings)
  average = jax.tree.map(jnp.copy, params)  # the state is donated
  state = dataclasses.replace(state, params=params, ema=average)
  return state, about | misfits


def _changed(
  experiment: Experiment, before: ConfigDict, symbols: str | None
) -> list[str]:
  """How the weights of another config mean something else here.

  `symbols` is what its symbols stand for; None if that is unknown.
  """
  here, there = map(_meaning, (experiment.config, before))
  here["symbols of data"], there["symbols of data"] = (
    experiment.source.symbols,
    symbols or experiment.source.symbols,
  )
  return [
    f"{name}={here.get(name)} here, but {there.get(name)} there"
    for name in {**there, **here}
    if here.get(name) != there.get(name)
  ]


def _meaning(config: ConfigDict) -> dict[str, Any]:
  """The settings that say what the weights of a network mean."""
  model = {
    name: config.model[name]
    for name in schema.Model().keys()
    if name not in MEANINGLESS
  }
  if model["key_heads"] == model["num_heads"]:
    model["key_heads"] = 0
  if model["positions"] == "learned":
    del model["rotary_base"]
  return {f"model.{name}": value for name, value in model.items()}


def _parse(text: str) -> tuple[pathlib.Path, str]:
  """(the workdir, "best", a step or "") of what `train.init_from` may be."""
  if files.from_config(text).is_dir():  # also one with a colon in its name
    return files.from_config(text), ""
  found = re.fullmatch(r"(.*?)(?::(best|[0-9]+))?", text, re.DOTALL)
  assert found
  return files.from_config(found[1]), found[2] or ""


def _find(run: store.Checkpoints, asked: str, text: str) -> int:
  """The step that is asked for; errors name `train.init_from`."""
  try:
    if asked == "best":
      return run.best_step()
    return run.check_step(int(asked) if asked else None)
  except (FileNotFoundError, ValueError) as error:
    raise type(error)(f"train.init_from={text}: {error}") from error


def _fit(
  params: dict,
  found: Mapping[str, jax.Array],
  changed: list[str],
  settings: ConfigDict,
) -> tuple[dict, dict[str, list[str]]]:
  """Parameters with the values found, and the names of what does not fit."""
  names = saved_arrays.by_name(params)
  reasons = {
    name: f"{name} is {list(found[name].shape) if name in found else 'absent'}"
    f" there and {list(x.shape)} here"
    for name, x in names.items()
    if name not in found or found[name].shape != x.shape
  }
  unused = {
    name: f"{name} is absent here" for name in found if name not in names
  }
  problems = [*changed, *reasons.values(), *unused.values()]
  if problems and (not settings.init_partial or len(reasons) == len(names)):
    raise ValueError(
      f"train.init_from={settings.init_from} is another network:"
      f" {', '.join(problems[:4])}; use the same settings of the model, the"
      " data's symbols and length and the patterns' parameters, or"
      " --config.train.init_partial=True, which takes the weights that fit"
    )
  used = [
    x if name in reasons else jax.device_put(found[name], x.sharding)
    for name, x in names.items()
  ]
  return jax.tree.unflatten(jax.tree.structure(params), used), dict(
    random=[*reasons], unused=[*unused], changed=changed
  )
