"""Counts what devices send each other if positions are split over them.

  python -m benchmarks.spread

One layer of attention with 2 heads of 16 in float32, on CPU devices that XLA
is made to show. Nothing is run: bytes are read from the collectives in compiled
programs. Writes benchmarks/results/spread.json, after each program, and prints
a table. What is there already is counted again only with --again.
"""

import contextlib
import functools
import itertools

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import record
from sparse_transformer import patterns
from sparse_transformer.attention import attend, registry
from sparse_transformer.attention.contract import Case
from sparse_transformer.targets import hlo
from sparse_transformer.training.analysis import exchanged

HEADS, WIDTH, ITEM = 2, 16, 4
LENGTHS = {4_096: (64, 16), 12_288: (128, 32)}  # (block, summary) of patterns
DEVICES = 4, 8, 32
PATTERNS = "Local", "Block", "Strided", "Summary", "BigBird"
NAMES = "pattern", "n", "devices"
PLANNED = "tile dealing queries keys imbalance forward backward".split()


def count(name: str, n: int, devices: int) -> dict:
  """Bytes that a device receives, as planned and in programs."""
  size, width = LENGTHS[n]
  sizes = dict(Summary=(size, width), BigBird=(64,))
  pattern = getattr(patterns, name)(*sizes.get(name, (size,)))
  case = Case(1, n, HEADS, WIDTH, WIDTH, "float32", "cpu")
  executor = registry.EXECUTORS[registry.resolve("auto", case)]
  (said,) = exchanged.traffic(executor, (pattern,) * HEADS, case, devices)
  return dict(
    expression=str(pattern),
    **{name: said[name] for name in PLANNED},
    forward_compiled=_compiled(pattern, n, devices),
    gather_of_keys_and_values=(n - n // devices) * HEADS * 2 * WIDTH * ITEM,
    forward_by_the_compiler_alone=_compiled(pattern, n, devices, False),
  )


def _compiled(pattern, n, devices, is_spread=True):
  """Bytes that a device receives in a compiled forward pass."""
  mesh = jax.make_mesh(
    (devices,), ("sequence",), (AxisType.Auto,), devices=jax.devices()[:devices]
  )
  spec = PartitionSpec(None, "sequence")
  split = NamedSharding(mesh, spec)
  x = jax.ShapeDtypeStruct((1, n, HEADS, WIDTH), "float32", sharding=split)
  given = spec if is_spread else None
  run = functools.partial(attend, patterns=pattern, spec=given)
  run = jax.jit(run, out_shardings=split)
  # Without a mesh in context, only the compiler knows of devices.
  with jax.set_mesh(mesh) if is_spread else contextlib.nullcontext():
    return received(run.lower(x, x, x).compile(), devices)


def received(program: jax.stages.Compiled, num_devices: int) -> int:
  """Bytes that a device receives from others in collectives of all devices.

  Sums over devices are counted as a ring computes them.
  """
  share = (num_devices - 1) / num_devices
  factors = {
    **dict.fromkeys(("all-gather", "all-to-all"), share),
    "all-reduce": 2 * share,
    "collective-permute": 1.0,
    "reduce-scatter": num_devices - 1.0,
  }
  found = hlo.profile(program.as_text()).collectives
  return round(sum(factors[kind] * size for kind, (_, size) in found.items()))


@record.as_table
def table(rows):
  """KiB that a device receives in a forward pass."""
  columns = {
    "forward": "forward",
    "backward": "backward",
    "gather_of_keys_and_values": "all-gather of K and V",
    "forward_by_the_compiler_alone": "compiler alone",
  }
  yield "pattern", "n", "devices", "keys move by", *columns.values()
  for row in rows:
    about = f"`{row['expression']}`", f"{row['n']:,}", str(row["devices"])
    yield *about, row["keys"], *(f"{row[x] / 1024:,.0f}" for x in columns)


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", max(DEVICES))
  keys = itertools.product(PATTERNS, LENGTHS, DEVICES)
  record.main_of_rows("spread", __doc__, NAMES, keys, count, table)
