"""Plans runs of 1,048,576 positions on many devices: nothing is measured.

  python -m benchmarks.plan

A network of the sizes of `configs/music_152m.py`, one sequence for each part of
the batch. What devices send each other and what a step computes follow from the
config, as `explain` prints them, for executors on NVIDIA GPUs. Times are these
figures divided by `FLOPS` and `BANDWIDTH`, which are assumptions. Writes
benchmarks/results/plan.json, and prints a table.
"""

from benchmarks import record
from configs import music_152m
from sparse_transformer import tables
from sparse_transformer.attention import registry
from sparse_transformer.comparison import plan as comparison
from sparse_transformer.training.analysis import costs, exchanged, peaks
from sparse_transformer.training.distributed import mesh
from sparse_transformer.training.experiment import Experiment

LENGTH, STRIDE = 1_048_576, 1024
# Per second and GPU: half of an H100's peak, and a link of 400 Gbit/s between
# hosts.
FLOPS = peaks.PEAKS["NVIDIA H100 80GB HBM3"]["bfloat16"] / 2
BANDWIDTH = 50e9
STRIDED = "Local(1024), Strided(1024), Local(1024), Local(1024)"
FIXED = "Block(1024), Summary(1024, 32)"
CASES = (
  (STRIDED, dict(sequence=64)),
  (STRIDED, dict(data=16, sequence=64)),
  (STRIDED, dict(sequence=1024)),
  (FIXED, dict(sequence=64)),
  (FIXED, dict(data=16, sequence=64)),
)


def measure() -> dict:
  assumed = dict(flops_per_second=FLOPS, bytes_per_second=BANDWIDTH)
  return dict(assumed=assumed, rows=[plan(*case) for case in CASES])


def plan(pattern: str, axes: dict[str, int]) -> dict:
  """Bytes and FLOPs that a device stores, receives and computes in a step."""
  values = {
    "data.length": LENGTH,
    "data.columns": STRIDE,
    "attention.pattern": pattern,
    "attention.cycle": (),
    "train.batch_size": axes.get("data", 1),
    "mesh.data": 1,
    **{f"mesh.{axis}": size for axis, size in axes.items()},
  }
  config = comparison.with_values(music_152m.get_config(), **values)
  model = Experiment(config).model
  sizes = mesh.sizes(config)
  devices = mesh.num_shards(sizes) * sizes["sequence"]
  with registry.targeting("cuda"):
    parts = exchanged.of_network(config, model, sizes)
  memory = costs.memory(config, model)
  flops = costs.step(config, model, costs.count_pairs(model))["flops"]["total"]
  # The backward pass repeats the forward pass, as model.remat is "block".
  attention = sum(
    row["layers"] * (2 * row["forward"] + row["backward"]) for row in parts
  )
  # A sum over devices, of all weights in the dtype of activations.
  gradients = 2 * memory["gradients"] * costs.itemsize(model) // 4
  return dict(
    pattern=pattern,
    mesh=axes,
    devices=devices,
    parts=parts,
    memory=memory,
    attention_bytes=attention,
    gradient_bytes=gradients,
    flops=flops // devices,
    compute_seconds=flops / devices / FLOPS,
    attention_seconds=attention / BANDWIDTH,
    gradient_seconds=gradients / BANDWIDTH,
  )


@record.as_table
def table(found):
  titles = "pattern", "chips", "mesh", "memory", "received per layer"
  yield *titles, "compute, ms", "attention transfers, ms", "gradient sums, ms"
  for row in found["rows"]:
    received = (
      f"{x['part'].partition('(')[0]}"
      f" {tables.size(2 * x['forward'] + x['backward'])}"
      for x in row["parts"]
    )
    names = "compute_seconds", "attention_seconds", "gradient_seconds"
    yield (
      f"`{row['pattern']}`",
      f"{row['devices']:,}",
      ", ".join(f"{axis}={size}" for axis, size in row["mesh"].items()),
      tables.size(row["memory"]["total"]),
      "; ".join(received),
      *(f"{1e3 * row[name]:,.1f}" for name in names),
    )


if __name__ == "__main__":
  record.main("plan", __doc__, measure, table)
