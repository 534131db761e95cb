"""Part 2: values and gradients of all executors over the catalogue.

The laws are those of the tests, `tests/executor_laws.py`: float64 NumPy from
the definition of a pattern, with cotangents of the output and of the
log-sum-exp. Heads have different patterns, among them some with rows without
keys; lengths are at the edges of tiles; K and E differ. Errors are relative to
the largest value of an array.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator import cases
from benchmarks.accelerator.parts import Settings

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests"))

import catalogue
import executor_laws as laws

# The largest error, by dtype, and the precision of its products: by default,
# JAX rounds float32 to TensorFloat-32 on GPUs and to bfloat16 on TPUs.
TOLERANCES = {"float32": 2e-5, "bfloat16": 0.02, "float16": 0.004}
PRECISION = {"float32": "highest"}
HEADS = 4  # patterns of a case
LENGTHS = 63, 64, 65, 127, 128, 129, 255, 257
WIDTHS = (64, 64), (64, 128), (16, 32)
SMALL_LENGTHS, SMALL_WIDTHS = (31, 32, 33, 40), ((16, 16), (16, 32), (32, 16))
SMALL_STEP = 5  # one mix of so many is run with small sizes


def entries(settings: Settings, rank: int) -> dict:
  """One for each dtype, mix of patterns and executor."""
  names = cases.executors(settings, rank)
  found = {}
  for dtype in TOLERANCES:
    for i, mix in mixes(settings.small):
      lengths = SMALL_LENGTHS if settings.small else LENGTHS
      widths = SMALL_WIDTHS if settings.small else WIDTHS
      n, width = lengths[i % len(lengths)], widths[i % len(widths)]
      for name in names:
        found[f"{dtype}, {i}, {name}"] = (
          lambda record, case=(name, mix, n, width, dtype): check(*case)
        )
  return found


def mixes(small: bool) -> list:
  """(number, patterns of all heads): each pattern of the catalogue once."""
  every = catalogue.ALL
  starts = range(0, len(every), HEADS)
  found = [(i, every[start : start + HEADS]) for i, start in enumerate(starts)]
  return found[::SMALL_STEP] if small else found


def check(
  name: str, heads: tuple, n: int, widths: tuple[int, int], dtype: str
) -> dict:
  """The largest errors of an executor, and whether one is too large."""
  if reason := cases.unsupported(name, 2, n, len(heads), widths, dtype):
    return {"skipped": reason}
  k, e = widths
  inputs = laws.random_inputs(n, len(heads), k, e, dtype=jnp.dtype(dtype))
  with jax.default_matmul_precision(PRECISION.get(dtype)):
    results = laws.run(*inputs, tuple(heads), name, 0)
  errors = relative_errors(results, laws.reference(*inputs, heads))
  found = {
    "executor": name,
    "dtype": dtype,
    "n": n,
    "widths": widths,
    "patterns": [str(pattern) for pattern in heads],
    "errors": {name: _finite(error) for name, error in errors.items()},
  }
  tolerance = TOLERANCES[dtype]
  large = {x: error for x, error in errors.items() if not error <= tolerance}
  if large:
    worst = ", ".join(f"{x} {error:.2g}" for x, error in large.items())
    found["failed"] = f"relative errors above {tolerance:g}: {worst}"
  return found


def relative_errors(results, expected) -> dict[str, float]:
  """The largest error of each array, relative to its largest value."""
  return {
    name: float(
      np.abs(np.asarray(x, np.float64) - y).max() / max(np.abs(y).max(), 1e-6)
    )
    for name, x, y in zip(laws.NAMES, results, expected, strict=True)
  }


def _finite(error):
  """An error as JSON: None if it is not a number."""
  return float(f"{error:.3g}") if np.isfinite(error) else None
