"""Measures how long saving a checkpoint delays training.

  python -m benchmarks.saving [--rounds=N] [--out=F]

Runs some steps without a checkpoint, with one that is written while they run,
and with one that they wait for, interleaved; wall time. The network is wide and
its batches are small, so that the state is large for the time of a step.
"""

import itertools
import statistics
import tempfile
import time

import jax

from benchmarks import record
from configs import digits
from sparse_transformer.training.checkpoints.store import Checkpoints
from sparse_transformer.training.experiment import Experiment

STEPS = 10
CASES = "none", "written meanwhile", "waited for"


def measure(rounds: int) -> dict:
  """Medians of the seconds of each case."""
  config = digits.get_config()
  config.model.width, config.train.batch_size = 384, 4
  run = Experiment(config)
  state, times = run.first_state(), {name: [] for name in CASES}
  batches = map(run.batch, itertools.count())
  with (
    tempfile.TemporaryDirectory() as workdir,
    Checkpoints(workdir, keep=1) as checkpoints,
    jax.set_mesh(run.mesh),
  ):
    for _ in range(1 + rounds):  # the first one compiles
      for name in CASES:
        jax.block_until_ready(state)
        start = time.perf_counter()
        if name != "none":
          checkpoints.save(state)
        if name == "waited for":
          checkpoints.finish()
        for batch in itertools.islice(batches, STEPS):
          state, _ = run.update(state, batch)
        jax.block_until_ready(state)
        times[name].append(time.perf_counter() - start)
        checkpoints.finish()
  size = sum(x.nbytes for x in jax.tree.leaves(state))
  medians = {name: statistics.median(x[1:]) for name, x in times.items()}
  seconds = {name: round(x, 3) for name, x in medians.items()}
  result = dict(megabytes=size / 1e6, steps=STEPS, seconds=seconds)
  print(table(result))
  return result


@record.as_table
def table(result):
  size, steps = result["megabytes"], result["steps"]
  yield f"checkpoint of {size:.0f} MB", f"{steps} steps"
  yield from ((name, f"{x:.2f} s") for name, x in result["seconds"].items())


if __name__ == "__main__":
  record.main("saving", __doc__, measure, rounds=5)
