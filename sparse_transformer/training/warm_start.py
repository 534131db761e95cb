"""Starts a run from the weights of another one."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sparse_transformer.data import files
from sparse_transformer.training.checkpoints import (
  exported,
  saved_arrays,
  store,
)
from sparse_transformer.training.distributed import processes
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.step import State


def first_state(experiment: Experiment) -> tuple[State, dict[str, Any] | None]:
  """The state before the first step, with the weights of `train.init_from`.

  The parameters and their average become the averaged weights of that run, or
  those of an exported file. The optimizer starts anew. Patterns and data may be
  others, as long as the parameters have the same shapes.

  Returns:
    (state, what it starts from, as JSON; None if from random weights). There,
    `random` names the parameters that stay random as there are none that fit,
    and `unused` those of the other run that have no place here.

  Raises:
    FileNotFoundError: the run has no checkpoint.
    ValueError: it has no such step, its checkpoint is damaged, or parameters do
      not fit and `train.init_partial` is False.
  """
  state, text = experiment.first_state(), experiment.config.train.init_from
  if not text:
    return state, None
  if text.endswith(exported.SUFFIXES):
    path = files.from_config(text)
    _, weights = processes.together(lambda: exported.load(path))
    found = saved_arrays.by_name(weights)
    about: dict[str, Any] = dict(file=text, crc32=f"{files.crc32(path):08x}")
  else:
    workdir, asked = _parse(text)
    run = store.Checkpoints(workdir)
    step = processes.decide(lambda: _find(run, asked, text))
    found = run.weights(step, experiment.mesh)
    fingerprint = processes.decide(lambda: run.fingerprint(step))
    about = dict(run=str(run.workdir), run_step=step, crc32=fingerprint)
  params, misfits = _fit(state.params, found, experiment.config.train, text)
  average = jax.tree.map(jnp.copy, params)  # the state is donated
  state = dataclasses.replace(state, params=params, ema=average)
  return state, about | misfits


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
  params: dict, found: Mapping[str, jax.Array], settings: Any, text: str
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
  problems = reasons | unused
  if problems and (not settings.init_partial or len(reasons) == len(names)):
    raise ValueError(
      f"train.init_from={text} is another network: "
      f"{', '.join([*problems.values()][:4])}; use the same settings of the"
      " model, the data's symbols and length and the patterns' parameters, or"
      " --config.train.init_partial=True, which leaves random what does not fit"
    )
  used = [
    x if name in reasons else jax.device_put(found[name], x.sharding)
    for name, x in names.items()
  ]
  return jax.tree.unflatten(jax.tree.structure(params), used), dict(
    random=[*reasons], unused=[*unused]
  )
