"""Measures a training step of 1,048,576 positions, split over 8 devices.

  python -m benchmarks.million

`configs/music_3m.py` with 2 layers, one of windows and one of columns, and one
head of width 32, in float32, on CPU devices that XLA emulates on one host. As
they share its cores, the time says nothing about several devices; the memory
does. Then the memory of a compiled step at n = 16,384, which is not run, by the
number of devices. Writes benchmarks/results/million.json, after each program,
and prints a table. What is there already is measured again only with --again.
"""

import os
import sys
import time

import jax
import numpy as np

from benchmarks import record
from configs import music_3m
from sparse_transformer.comparison import execution, plan as comparison
from sparse_transformer.tables import size
from sparse_transformer.training.experiment import Experiment

DEVICES = 8
MILLION, SHORTER = (1_048_576, 1024), (16_384, 128)  # (length, stride)
SPLITS = 1, 2, 4, 8
NAMES = "n", "stride", "sequence"
# Devices that share few cores wait long for each other.
FLAGS = (
  "--xla_cpu_collective_call_warn_stuck_timeout_seconds=3600",
  "--xla_cpu_collective_call_terminate_timeout_seconds=7200",
)


def measure(n: int, stride: int, sequence: int) -> dict:
  """Memory of a compiled step and, of the long one, of a process that runs it.

  The n positions are split over `sequence` devices.
  """
  values = {
    "data.length": n,
    "data.columns": stride,
    "model.num_layers": 2,
    "model.num_heads": 1,
    "model.width": 32,
    "model.dtype": "float32",
    "attention.stride": stride,
    "attention.window": stride,
    "train.batch_size": 1,
    "mesh.data": 1,
    "mesh.sequence": sequence,
  }
  config = comparison.with_values(music_3m.get_config(), **values)
  experiment = Experiment(config, devices=tuple(jax.devices()[:sequence]))
  tokens = np.random.default_rng(0).integers(
    experiment.model.vocab_size, size=(1, n), dtype=np.uint8
  )
  row = record.about("python -m benchmarks.million", sys.argv[1:]) | dict(
    layers=config.model.num_layers,
    width=config.model.width,
    pattern=[str(heads[0]) for heads in experiment.model.patterns],
  )
  with jax.set_mesh(experiment.mesh):
    tokens = jax.device_put(tokens, experiment.batch_sharding)
    step = experiment.update.lower(experiment.like, tokens).compile()
    memory = step.memory_analysis()
    row["arguments"] = memory.argument_size_in_bytes
    row["temporaries"] = memory.temp_size_in_bytes
    if n == MILLION[0]:
      state, start = experiment.first_state(), time.perf_counter()
      _, metrics = step(state, tokens)
      row |= dict(
        nats=float(metrics["nats"]),
        seconds=round(time.perf_counter() - start, 1),
        process_bytes=execution.peak_bytes(),
      )
  return row


@record.as_table
def table(rows):
  titles = "n", "`mesh.sequence`", "arguments", "temporaries"
  yield *titles, "process with all devices", "step"
  for row in rows:
    sizes = size(row["arguments"]), size(row["temporaries"])
    ran = "not run", "not run"
    if "process_bytes" in row:
      ran = size(row["process_bytes"]), f"{row['seconds']:,.0f} s"
    yield f"{row['n']:,}", f"{row['sequence']}", *sizes, *ran


if __name__ == "__main__":
  os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", DEVICES)
  # The long one first: the peak of a process covers all that it has done.
  keys = [(*MILLION, DEVICES), *((*SHORTER, split) for split in SPLITS)]
  record.main_of_rows("million", __doc__, NAMES, keys, measure, table)
