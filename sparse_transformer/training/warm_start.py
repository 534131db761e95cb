"""Starts a run from the weights of another one."""

import dataclasses
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
  text = experiment.config.train.init_from
  if not text:
    return experiment.first_state(), None
  if text.endswith(exported.SUFFIX):
    path = files.from_config(text)
    file = processes.together(lambda: exported.load(path))
    found, config = store.by_name(file.params), file.config
    there = dict(symbols=file.source.symbols, classes=file.source.classes)
    about: dict[str, Any] = dict(file=text, crc32=f"{files.crc32(path):08x}")
  elif released.TEXT.fullmatch(text):
    found, about = processes.together(
      lambda: released.load(text, experiment.config.data.orders)
    )
    config, there = experiment.config, {}
  else:
    run, step = _open(text)
    found = run.weights(step, experiment.mesh)
    config, other = run.config(step), run.describe(step)
    there = {x: other[x] for x in ("symbols", "classes")}
    about = dict(run=str(run.workdir), run_step=step)
  changed, attention = _changed(config, experiment)
  for name, value in there.items():
    here = getattr(experiment.source, name)
    if value and here and value not in (here, [*here]):
      changed.append(f"{name} of data={here} here, but {value} there")
  state = experiment.first_state()
  params, misfits = _fit(state.params, found, changed, experiment.config.train)
  if experiment.config.data.name != released.SOURCE or any(misfits.values()):
    about.pop("bits", None)  # of other images, or of another network
  average = jax.tree.map(jnp.copy, params)  # the state is donated
  state = dataclasses.replace(state, params=params, ema=average)
  return state, about | misfits | dict(attention=attention)


def _changed(before, experiment):
  """Settings by which weights mean something else, and those of patterns."""
  changes = config_lib.compare(before, experiment.config)
  learned = any(x.is_learned for x in experiment.model.contents)
  changed: list[str] = []
  attention: list[str] = []
  for name, (there, here) in changes.items():
    line = f"{name}={here} here, but {there} there"
    affected = schema.affects(name)
    is_of_model = name.startswith("model.") and affected == "all"
    if is_of_model or (name == "attention.pattern" and learned):
      changed.append(line)  # a pattern: as the reach of a span
    elif affected == "scores":
      attention.append(line)
  return changed, attention


def _open(text: str) -> tuple[store.Saved, int]:
  name, _, asked = text.rpartition(":")
  if not name or files.from_config(text).is_dir():
    name, asked = text, ""  # whose name may have a colon
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


def _fit(params, found, changed, settings):
  """Parameters with the values found, and the names of what does not fit."""
  names = store.by_name(params)
  reasons = {
    name: f"{name} is {list(found[name].shape) if name in found else 'absent'}"
    f" there and {list(x.shape)} here"
    for name, x in names.items()
    if name not in found or found[name].shape != x.shape
  }
  unused = [name for name in found if name not in names]
  problems = [*changed, *reasons.values()]
  problems += [f"{name} is absent here" for name in unused]
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
  misfits = dict(random=[*reasons], unused=unused, changed=changed)
  return jax.tree.unflatten(jax.tree.structure(params), used), misfits
