"""Compiles attention by itself for absent devices.

  python -m benchmarks.kernels

Forward and backward pass of one layer with 8 heads, merged fixed or strided, in
bfloat16, with one sequence on each device. Writes
benchmarks/results/kernels.json, after each program, and prints a table. What
was compiled from the same code is compiled again only with --again. Nothing is
run: see docs/accelerators.md for what that means.
"""

import itertools

from benchmarks import dependencies, record
from configs import enwik8
from sparse_transformer.targets import compilers, hardware

NAMES = "target", "backend", "pattern", "n", "qk_width", "value_width"
TARGETS = "h100", "v5e", "v6e"
PATTERNS = "fixed", "strided"
LENGTHS = 3_072, 12_288
WIDTHS = (64, 64), (128, 128)
FUSED = [
  (target, "auto", pattern, n, *widths)
  for target in TARGETS
  for pattern, n, widths in itertools.product(PATTERNS, LENGTHS, WIDTHS)
]
# What plain XLA launches instead.
PLAIN = [
  ("h100", backend, pattern, 12_288, 64, 64)
  for backend, pattern in itertools.product(("batched", "streamed"), PATTERNS)
]


@record.as_table
def table(rows):
  shown = *NAMES, "executor", "launches"
  yield *shown, "peak MiB"
  for row in rows:
    peak = f"{row['peak_bytes'] / 2**20:.0f}"
    yield *(str(row[name]) for name in shown), peak


def code_of(*_) -> str:
  """The digest of what a program depends on: the same for all."""
  return dependencies.of_program(enwik8.get_config())


def compile_attention(
  name, backend, pattern, n, qk_width, value_width, old
) -> dict:
  """Launches and memory of one program, and what its kernels take."""
  del old  # compiling takes a few seconds
  target = hardware.parse(name)
  config = enwik8.get_config()
  config.data.length = n
  config.model.num_layers, config.model.num_heads = 1, 8
  config.model.width = 8 * value_width
  config.model.half_size = qk_width != value_width
  config.attention.pattern, config.attention.backend = pattern, backend
  config.train.batch_size = target.num_devices
  report = compilers.compile_for(target, config, "attention")
  (program,) = report["programs"]
  if not program["compiles"]:
    raise ValueError(f"{name}, {program['name']}: {program['reason']}")
  fields = "executor", "launches", "copies", "kernels"
  return {field: program[field] for field in fields} | dict(
    jax=report["jax"], peak_bytes=program["memory"]["peak"]
  )


if __name__ == "__main__":
  record.main_of_rows(
    "kernels", __doc__, NAMES, PLAIN + FUSED, compile_attention, table, code_of
  )
