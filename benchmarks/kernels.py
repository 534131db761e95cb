"""Compiles attention by itself for absent devices.

  python -m benchmarks.kernels

Forward and backward pass of one layer with 8 heads, merged fixed or strided, in
bfloat16, with one sequence on each device. Writes
benchmarks/results/kernels.json, after each program, and prints a table. What
was compiled from the same code is compiled again only with --again. Nothing is
run: see docs/accelerators.md for what that means.
"""

import argparse
import itertools

from benchmarks import dependencies, record
from configs import enwik8
from sparse_transformer import tables
from sparse_transformer.targets import catalogue, compilers

RESULTS = record.FOLDER / "kernels.json"
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


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--again", action="store_true")
  parser.add_argument("--check", action="store_true", help="compile nothing")
  args, keys = parser.parse_args(), PLAIN + FUSED
  if args.check:
    record.check_code(RESULTS, NAMES, code_of, "benchmarks.kernels")
    return
  rows = record.measure_missing(
    RESULTS, NAMES, keys, compile_attention, args.again, code_of
  )
  titles = *NAMES, "executor", "launches", "peak MiB"
  print(tables.markdown([titles, *map(_cells, rows)]))


def _cells(row):
  size = f"{row['peak_bytes'] / 2**20:.0f}"
  return *(str(row[x]) for x in (*NAMES, "executor", "launches")), size


def code_of(*key) -> str:
  """The digest of what a program depends on: the same for all."""
  del key
  return dependencies.of_program(enwik8.get_config())


def compile_attention(
  name, backend, pattern, n, qk_width, value_width, old
) -> dict:
  """Launches and memory of one program, and what its kernels take."""
  del old  # a few seconds
  target = catalogue.parse(name)
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
  main()
