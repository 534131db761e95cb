"""Step time, memory and utilization of the configs.

On random tokens, so that no data are needed, in the dtype of the config.
"""

import functools
import itertools
import time

import jax

from benchmarks import timing
from benchmarks.accelerator import training
from benchmarks.accelerator.parts import Settings
from benchmarks.record import FOLDER, REPO
from sparse_transformer import atomic, machine, rules
from sparse_transformer.attention import registry
from sparse_transformer.training.analysis import costs
from sparse_transformer.training.distributed import mesh

FIRST = "enwik8", "cifar10", "cifar10_15m"
# The paper's networks, which are also run with every `model.remat`.
PAPER = *FIRST, "imagenet64"
ROUND_SECONDS = 1.0


def entries(settings: Settings, rank: int) -> dict:
  """One for each config, the paper's first, and then with other `remat`s."""
  changes = training.SMALL["digits"] if settings.small else {}
  return {
    ", ".join(filter(None, case)): functools.partial(measure, *case, changes)
    for case in _chosen(settings.small, rank)
  }


def _chosen(small, rank):
  """(name of a config, its `remat`, or "" for the config's) of a rank."""
  if small:
    return [("digits", remat) for remat in ("none", "block")[rank : rank + 1]]
  if rank == 2:
    of = lambda name: training.load(name).config.model.remat
    cases = itertools.product(PAPER, rules.REMATS)
    return [(name, remat) for name, remat in cases if remat != of(name)]
  names = sorted(path.stem for path in (REPO / "configs").glob("*.py"))
  others = [x for x in dict.fromkeys([*PAPER, *names]) if x not in FIRST]
  others.remove("default")
  return [(name, "") for name in (others if rank else FIRST)]


def measure(name: str, remat: str, changes: dict, record) -> dict:
  """Compiles the training step of a config, and runs it if it fits."""
  other = {"model.remat": remat} if remat else {}
  experiment = training.load(name, **changes | needed(name) | other)
  config, model = experiment.config, experiment.model
  mesh.check_batch(config, experiment.mesh.shape)
  batch, start = training.random_tokens(experiment, 0), time.perf_counter()
  with jax.set_mesh(experiment.mesh):
    update = experiment.update.lower(experiment.like, batch).compile()
  plan = update.memory_analysis()
  found = {
    "batch": config.train.batch_size,
    "accumulation": config.train.accumulation,
    "dtype": model.dtype,
    "remat": model.remat,
    "compile_seconds": time.perf_counter() - start,
    "compiled_bytes": plan.argument_size_in_bytes
    + plan.output_size_in_bytes
    + plan.temp_size_in_bytes
    - plan.alias_size_in_bytes,
  }
  record(found)
  memory = machine.device_memory()
  if memory and found["compiled_bytes"] > memory:
    sizes = (x / 2**30 for x in (found["compiled_bytes"], memory))
    reason = "a device needs {:.1f} of its {:.1f} GiB"
    return found | {"skipped": reason.format(*sizes)}
  found["step"] = _time_steps(update, experiment.first_state(), batch)
  stats = jax.local_devices()[0].memory_stats() or {}
  found["peak_bytes"] = stats.get("peak_bytes_in_use")
  tokens = config.train.batch_size * model.length
  flops = costs.model_flops(config, model)
  return found | costs.speed(
    tokens / found["step"]["median"], flops / tokens, model.dtype
  )


def needed(name: str) -> dict:
  """Changes with which this GPU's memory is enough, as compiled; else {}."""
  memory = machine.device_memory()
  if registry.current_platform() != "cuda" or not memory:
    return {}
  for row in atomic.read_json(FOLDER / "compiled.json"):
    preset, *fields = row["preset"].split()
    changes = dict(field.split("=") for field in fields)
    (program,) = row["programs"]
    is_of_name = (preset, row["target"]) == (name, "h100:1x1x1")
    if is_of_name and changes.keys() <= {"train.accumulation"}:
      if program["compiles"] and program["memory"]["peak"] <= memory:
        return {field: int(value) for field, value in changes.items()}
  return {}


def _time_steps(update, state, batch):
  """Seconds of a step, which waits for the one before it only."""

  def step():
    nonlocal state
    state, _ = update(state, batch)
    return state

  warm = timing.warm_up(step)
  return timing.interleave({0: step}, {0: warm}, least=ROUND_SECONDS)[0]
