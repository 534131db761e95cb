"""Measures how long saving a checkpoint delays training.

  python -m benchmarks.saving [--rounds=N] [--out=F]

Runs some steps without a checkpoint, with one that is written while they run,
and with one that they wait for, interleaved; wall time. The network is wide and
its batches are small, so that the state is large for the time of a step.
"""

import functools
import itertools
import statistics
import tempfile

import jax

from benchmarks import record, timing
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
  state, batches = run.first_state(), map(run.batch, itertools.count())
  with (
    tempfile.TemporaryDirectory() as workdir,
    Checkpoints(workdir, keep=1) as checkpoints,
    jax.set_mesh(run.mesh),
  ):

    def advance(name):
      nonlocal state
      if name != "none":
        checkpoints.save(state)
      if name == "waited for":
        checkpoints.finish()
      for batch in itertools.islice(batches, STEPS):
        state, _ = run.update(state, batch)
      jax.block_until_ready(state)

    calls = {name: functools.partial(advance, name) for name in CASES}
    times = timing.seconds(calls, rounds, between=checkpoints.finish)
  size = sum(x.nbytes for x in jax.tree.leaves(state))
  seconds = {x: round(statistics.median(y), 3) for x, y in times.items()}
  return dict(megabytes=size / 1e6, steps=STEPS, seconds=seconds)


@record.as_table
def table(result):
  size, steps = result["megabytes"], result["steps"]
  yield f"checkpoint of {size:.0f} MB", f"{steps} steps"
  yield from ((name, f"{x:.2f} s") for name, x in result["seconds"].items())


if __name__ == "__main__":
  record.main("saving", __doc__, measure, table, rounds=5)
