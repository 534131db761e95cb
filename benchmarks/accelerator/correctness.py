"""Compares values and gradients of all backends with float64 on the host.

An entry runs a mix of patterns, one for each head, in one call. The results
must agree with the reference in tests/helpers or, at large n, with the plainest
backend in float32. A second call must give bitwise-identical results. A batch
includes large, ordinary and balanced scores. With balanced scores, a single
extra or missing pair causes an error larger than the tolerance.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.accelerator import backends
from benchmarks.accelerator.child import Settings
from benchmarks.record import REPO
from sparse_transformer import patterns
from sparse_transformer.attention import Request, registry, verification
from sparse_transformer.attention.backends import cudnn
from sparse_transformer.attention.verification import TOLERANCES

sys.path.insert(0, str(REPO / "tests"))

from helpers import backend_laws as laws, catalogue

MIXES = 6  # number of mixes into which the catalogue is divided
LENGTHS = 257, 128, 129, 255, 63, 200
WIDTHS = (64, 64), (32, 64), (64, 128), (128, 64), (16, 32), (128, 128)
# The maximum width of float32 queries and keys in Triton's kernels.
MAX_FLOAT32_WIDTH = 64
# Patterns whose longest rows contain 15 full tiles of 64.
FULL = (
  *("Causal()", "Full()", "Local(400)", "Local(300, causal=False)"),
  *("Block(256)", "Strided(32)", "Block(128) | Summary(128, 32)"),
  "BigBird(block=64)",
)
DENSE = "Causal()", "Full()"
# {n: stride}. At the last two lengths, Triton splits long lists of queries.
STRIDES = {3072: 96, 12_288: 128, 65_536: 256}
PAPER = "Local({l}) | Strided({l})", "Block({l}) | Summary({l}, 32)"
LONG = {
  n: (
    *["Causal()"] * (n < 65_536),
    *(text.format(l=stride) for text in PAPER),
    "BigBird(block=64)",
  )
  for n, stride in STRIDES.items()
}
PLAIN = "streamed"  # the backend with which long mixes are compared
# {dtype: k}. Backends that `auto` does not choose run only every k-th mix, and
# no long mixes.
ONE_IN = {"bfloat16": 1, "float32": 2, "float16": 7}
ONE_OF_FIRST = dict.fromkeys(TOLERANCES, 1)
# The maximum number of positions for which the float64 reference is computed.
MAX_REFERENCE = 1024
SMALL_LENGTHS, SMALL_WIDTHS = (40, 33), ((16, 32), (32, 16))
SMALL_FULL = "Causal()", "Local(60)", "Block(32)"
SMALL_LONG = {300: ("Causal()", "Local(20) | Strided(20)")}
Arrays = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Mix:
  """The input of an entry: the pattern of each head, at n positions."""

  heads: tuple[patterns.Pattern, ...]
  n: int
  widths: tuple[int, int]  # of queries and keys, and of values

  @property
  def is_long(self) -> bool:
    return self.n > MAX_REFERENCE

  def request(self, dtype: str) -> Request:
    """Returns the request of `attend`."""
    width, value_width = self.widths
    return backends.request_for(
      self.heads,
      self.n,
      batch=len(verification.SCORES),
      width=width,
      value_width=value_width,
      dtype=dtype,
      lse=True,
    )


def entries(settings: Settings) -> dict:
  """Returns an entry for each backend, dtype and mix, most valuable first."""
  first, *others = backends.names(settings.backends)
  found = {}
  for names, steps in (([first], ONE_OF_FIRST), (others, ONE_IN)):
    for dtype, step in steps.items():
      every = mixes(settings.small, dtype).items()
      chosen = [x for x in every if names == [first] or not x[1].is_long]
      for name in names:
        for title, mix in chosen[::step]:
          run = functools.partial(check, name, mix, dtype)
          found[f"{name}, {dtype}, {title}"] = run
    if backends.CUDNN in names:
      for dtype in cudnn.DTYPES:
        run = functools.partial(check_dense, dtype)
        found[f"{backends.CUDNN}, {dtype}, dense patterns"] = run
  return found


def check_dense(dtype: str) -> dict:
  """Checks the patterns that cuDNN runs.

  It is checked separately, because it does not return log-sum-exp.
  """
  faults: list[str] = []
  for heads, n in ((DENSE, 3072), (DENSE[:1], 517)):  # the second is padded
    shape = n, len(heads), 64
    found = verification.verify(heads, shape, dtype, backend=backends.CUDNN)
    faults += found.faults
  return {"failed": "; ".join(faults)} if faults else {}


def mixes(small: bool, dtype: str) -> dict[str, Mix]:
  """Returns {title: mix} for a dtype, with every pattern of the catalogue."""
  lengths, widths = LENGTHS, WIDTHS
  full, long = (1000, FULL), LONG if dtype == "bfloat16" else {3072: LONG[3072]}
  if small:
    lengths, widths = SMALL_LENGTHS, SMALL_WIDTHS
    full, long = (150, SMALL_FULL), SMALL_LONG
  shift = 2 * list(TOLERANCES).index(dtype)  # dtypes use different lengths
  found = {}
  for i, width in enumerate(widths):
    n = lengths[(i + shift) % len(lengths)]
    found[f"catalogue {i + 1}"] = Mix(catalogue.ALL[i::MIXES], n, width)
  n, texts = full
  found["full tiles"] = Mix(_parse(texts), n, widths[0])
  for n, texts in long.items():
    found[f"n = {n}"] = Mix(_parse(texts), n, widths[0])
  if dtype == "float32":
    for title, mix in found.items():
      widths = min(mix.widths[0], MAX_FLOAT32_WIDTH), mix.widths[1]
      found[title] = dataclasses.replace(mix, widths=widths)
  return found


def _parse(texts):
  return tuple(patterns.parse(text)[0][0] for text in texts)


def check(name: str, mix: Mix, dtype: str) -> dict:
  """Returns the errors of a backend; raises Unsupported if it cannot run."""
  registry.resolve(name, mix.request(dtype))
  run = lambda *inputs: laws.run(*inputs, mix.heads, name, 0)
  errors, faults = examine(run, *ask(mix, dtype))
  found = dict(backend=name, dtype=dtype, n=mix.n, widths=mix.widths)
  found["patterns"] = [str(pattern) for pattern in mix.heads]
  rounded = lambda x: float(f"{x:.3g}") if np.isfinite(x) else None
  found["errors"] = {name: rounded(error) for name, error in errors.items()}
  return found | ({"failed": "; ".join(faults)} if faults else {})


def ask(mix: Mix, dtype: str) -> tuple[Arrays, Arrays]:
  """Returns the inputs of a mix, q, k, v, dout, dlse, and expected results."""
  inputs = verification.draw(mix.request(dtype))
  if not mix.is_long:
    return inputs, laws.reference(*inputs, mix.heads)
  exact = [x.astype(np.float32) for x in inputs]
  with jax.default_matmul_precision("highest"):
    return inputs, jax.device_get(laws.run(*exact, mix.heads, PLAIN, 0))


def examine(
  run: Callable[..., Any], inputs: Arrays, expected: Arrays
) -> tuple[dict[str, float], list[str]]:
  """Returns the errors of an attention, and lines that describe its faults.

  Args:
    run: a function of q, k, v, dout, dlse that returns out, lse, dq, dk, dv,
      where lse is 0 for rows without keys. It is called twice.
    inputs: q, k, v, dout, dlse.
    expected: the expected results of `run`.
  """
  dtype = inputs[0].dtype.name
  with jax.default_matmul_precision(verification.PRECISION.get(dtype)):
    first, again = (
      [np.asarray(x) for x in jax.device_get(run(*inputs))] for _ in range(2)
    )
  errors, faults = verification.compare(first, expected, dtype)
  named = zip(verification.NAMES, first, again, strict=True)
  differ = [x for x, a, b in named if a.tobytes() != b.tobytes()]
  same = [f"{', '.join(differ)} differ between two runs"] if differ else []
  return errors, same + faults
