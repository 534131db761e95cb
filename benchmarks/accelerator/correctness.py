"""Values and gradients of all executors, against float64 on the host.

An entry runs a mix of patterns, one for each head, in one call; it requires the
results of the definition of the pattern (see `tests/executor_laws.py`), the
same bits when it runs again, and no effect outside the pattern. See
docs/accelerators.md for the mixes, and for the three kinds of inputs that make
a batch: large scores, ordinary ones, and balanced ones, where all pairs of a
row weigh about the same, so that one pair too many exceeds the tolerance.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator import cases, sanitizer
from benchmarks.accelerator.parts import Settings
from benchmarks.record import REPO
from sparse_transformer import patterns
from sparse_transformer.patterns import analysis

sys.path.insert(0, str(REPO / "tests"))

import catalogue
import executor_laws as laws

# The largest error by dtype, relative to the largest value of a head. In
# Pallas' interpreter, Triton's kernels show 0.008, 3e-6 and 0.0009; on a GPU,
# products of float32 are sums of three in TensorFloat-32.
TOLERANCES = {"bfloat16": 0.012, "float32": 2e-5, "float16": 0.002}
# The largest error of the log-sum-exp, absolute. Scores are accumulated in
# float32 whatever the dtype, and one wrong pair in 5,000 exceeds this.
LSE_TOLERANCE = 1e-4
# By default, JAX rounds products in float32 to TensorFloat-32 on GPUs, and to
# bfloat16 on TPUs.
PRECISION = {"float32": "highest"}
# Of the sequences in a batch: the factor of the queries, and the factor of the
# tolerances, as rounding errors grow with the scores.
SCORES, ALLOWED = (32, 1, 1 / 8), (5, 1, 1)
BALANCED = 2  # the sequence whose pairs all weigh about the same
MIXES = 6  # of the catalogue
LENGTHS = 257, 128, 129, 255, 63, 200
WIDTHS = (64, 64), (32, 64), (64, 128), (128, 64), (16, 32), (128, 128)
MAX_FLOAT32_WIDTH = 64  # of queries and keys, in Triton's kernels
# Whose longest rows have 15 full tiles of 64.
FULL = (
  *("Causal()", "Full()", "Local(400)", "Local(300, causal=False)"),
  *("Block(256)", "Strided(32)", "Block(128) | Summary(128, 32)"),
  "BigBird(block=64)",
)
# {n: stride}; at the last two lengths, Triton splits long lists of queries.
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
# Other executors than `auto` takes run one in so many mixes, none of them long.
ONE_IN = {"bfloat16": 1, "float32": 2, "float16": 7}
GROUPS = 8  # of these rows, whose keys are gathered together
SAMPLED, ISOLATED = 64, 8  # rows of a head in long mixes, and in the others
SMALL_LENGTHS, SMALL_WIDTHS = (40, 33), ((16, 32), (32, 16))
SMALL_FULL = "Causal()", "Local(60)", "Block(32)"
SMALL_LONG = {300: ("Causal()", "Local(20) | Strided(20)")}

Results = list[np.ndarray]  # out, lse, dq, dk, dv


@dataclasses.dataclass(frozen=True)
class Mix:
  """What an entry runs: the pattern of each head, at n positions."""

  heads: tuple[patterns.Pattern, ...]
  n: int
  widths: tuple[int, int]  # of queries and keys, and of values
  num_rows: int = ISOLATED  # rows of each head that are isolated
  is_sampled: bool = False  # if so, only they are compared, and as many keys


@dataclasses.dataclass(frozen=True, eq=False)
class Questions:
  """Inputs of a mix, and what is known about the results, in float64."""

  mix: Mix
  inputs: tuple[np.ndarray, ...]  # q, k, v, dout, dlse [B, n, H, ...]
  rows: np.ndarray  # int [H, rows], the isolated rows of each head
  seen: np.ndarray  # bool [n, H], the keys that an isolated row sees
  # `inputs` with cotangents on isolated rows only, and other values wherever
  # these rows must not look.
  isolated: tuple[np.ndarray, ...]
  # For `isolated`: out, lse and dq of the rows [B, rows, H, ...]; dk and dv.
  of_rows: Results
  of_all: Results | None  # for `inputs`; None if the mix is sampled


def entries(settings: Settings, rank: int) -> dict:
  """One for each executor, dtype and mix, the most valuable first."""
  first, found = cases.executors(settings, 0), {}
  for name in cases.executors(settings, rank) + first * (rank == 1):
    for dtype, step in ONE_IN.items():
      if name in first and (rank == 0) != (dtype == "bfloat16"):
        continue
      chosen = [*mixes(settings.small, dtype).items()]
      if name not in first:
        chosen = [x for x in chosen if not x[1].is_sampled][::step]
      for title, mix in chosen:
        run = functools.partial(check, name, mix, dtype)
        found[f"{name}, {dtype}, {title}"] = run
  if rank == 1 and "triton" in first:
    found = sanitizer.entries() | found
  return found


def mixes(small: bool, dtype: str) -> dict[str, Mix]:
  """The mixes of a dtype by title, with every pattern of the catalogue."""
  lengths, widths = LENGTHS, WIDTHS
  full, long = (1000, FULL), LONG if dtype == "bfloat16" else {3072: LONG[3072]}
  if small:
    lengths, widths = SMALL_LENGTHS, SMALL_WIDTHS
    full, long = (150, SMALL_FULL), SMALL_LONG
  shift = 2 * list(TOLERANCES).index(dtype)  # other lengths for other dtypes
  found = {}
  for i, width in enumerate(widths):
    n = lengths[(i + shift) % len(lengths)]
    found[f"catalogue {i + 1}"] = Mix(catalogue.ALL[i::MIXES], n, width)
  n, texts = full
  found["full tiles"] = Mix(_parse(texts), n, widths[0])
  for n, texts in long.items():
    sampled = 16 if small else SAMPLED
    found[f"n = {n}"] = Mix(_parse(texts), n, widths[0], sampled, True)
  if dtype == "float32":
    for title, mix in found.items():
      widths = min(mix.widths[0], MAX_FLOAT32_WIDTH), mix.widths[1]
      found[title] = dataclasses.replace(mix, widths=widths)
  return found


def _parse(texts):
  return tuple(patterns.parse(text)[0][0] for text in texts)


def check(name: str, mix: Mix, dtype: str, record=None) -> dict:
  """What an executor gets wrong, as the result of an entry."""
  del record
  sizes = len(SCORES), mix.n, len(mix.heads), mix.widths
  if reason := cases.unsupported(name, *sizes, dtype):
    return {"skipped": reason}
  errors, faults = examine(
    lambda *inputs: laws.run(*inputs, mix.heads, *cases.parse(name)),
    ask(mix, dtype),
  )
  found = dict(executor=name, dtype=dtype, n=mix.n, widths=mix.widths)
  found["patterns"] = [str(pattern) for pattern in mix.heads]
  found["errors"] = {
    name: float(f"{error:.3g}") if np.isfinite(error) else None
    for name, error in errors.items()
  }
  return found | ({"failed": "; ".join(faults)} if faults else {})


def ask(mix: Mix, dtype: str) -> Questions:
  """Draws the inputs of a mix, and computes what `examine` compares with."""
  rng = np.random.default_rng(mix.n)
  inputs = _draw(mix, dtype, rng)
  rows, seen = _choose_rows(mix, rng)
  isolated = _isolate(inputs, rows, seen)
  of_all = None if mix.is_sampled else laws.reference(*inputs, mix.heads)
  of_rows = _by_head(
    lambda i, *arrays: _reference_of_rows(mix.heads[i], rows[i], *arrays),
    *isolated,
  )
  return Questions(mix, inputs, rows, seen, isolated, of_rows, of_all)


def examine(
  run: Callable[..., Any], questions: Questions
) -> tuple[dict[str, float], list[str]]:
  """The errors of an attention, and lines that say what is wrong with it.

  `run` maps q, k, v, dout and dlse to out, lse, dq, dk and dv, where lse is 0
  for rows without keys. It is called three times with the same shapes. Errors
  are relative to the largest value of a head, or absolute for lse, over the
  factor in `ALLOWED`.
  """
  dtype = questions.inputs[0].dtype.name
  with jax.default_matmul_precision(PRECISION.get(dtype)):
    first, again, isolated = (
      [np.asarray(x) for x in jax.device_get(run(*inputs))]
      for inputs in (questions.inputs, questions.inputs, questions.isolated)
    )
  with np.errstate(all="ignore"):  # wrong results may be infinite, or NaN
    errors = _errors(questions, first, isolated)
  named = dict(zip(laws.NAMES, zip(first, again, strict=True), strict=True))
  differ = [x for x, (a, b) in named.items() if a.tobytes() != b.tobytes()]
  faults = [f"{', '.join(differ)} differ between two runs"] if differ else []
  faults += _effects_outside(questions, first, isolated)
  relative = TOLERANCES[dtype]
  for name, error in errors.items():
    tolerance = LSE_TOLERANCE if name == "lse" else relative
    if not error <= tolerance:
      faults.append(f"error of {name} {error:.2g}, above {tolerance:g}")
  return errors, faults


def _draw(mix, dtype, rng):
  """q, k, v, dout and dlse, see the top of this module."""
  (k, e), num_heads = mix.widths, len(mix.heads)
  rows = len(SCORES), mix.n, num_heads
  q, k, v, dout, dlse = (
    rng.standard_normal(rows + width, np.float32)
    for width in ((k,), (k,), (e,), (e,), ())
  )
  q *= np.array(SCORES, np.float32)[:, None, None, None]
  # Weights are about 1 / number of keys; with cotangents times that, all rows
  # count alike. The gradient of lse exceeds those of the weights, so that
  # gradients of scores are not near zero by chance.
  counts = np.stack(
    [analysis.keys_per_query(pattern, mix.n) for pattern in mix.heads], 1
  )
  dout[BALANCED] *= counts[:, :, None]
  dlse[BALANCED] = np.sign(dlse[BALANCED]) * counts * (4 * np.sqrt(e))
  return *(x.astype(jnp.dtype(dtype)) for x in (q, k, v, dout)), dlse


def _choose_rows(mix, rng):
  """The isolated rows of each head, and the keys that they see.

  Half of the heads have theirs among the first rows only, so that causal
  patterns leave keys that none of them sees.
  """
  n, num = mix.n, min(mix.num_rows, mix.n // 2)
  rows, seen = [], []
  for i, pattern in enumerate(mix.heads):
    rows.append(np.sort(rng.choice(n if i % 2 else -(-n // 2), num, False)))
    seen.append(_pairs(pattern, rows[i], np.arange(n)).any(0))
  return np.stack(rows), np.stack(seen, 1)


def _pairs(pattern, queries, keys):
  """Which pairs of some positions are in a pattern: bool [queries, keys]."""
  mask = pattern.mask(queries[:, None], keys)
  return np.broadcast_to(mask, (len(queries), len(keys)))


def _isolate(inputs, rows, seen):
  """Changes what the rows do not see, and drops other rows' cotangents."""
  q, k, v, dout, dlse = inputs
  is_row = np.zeros(seen.shape, bool)
  np.put_along_axis(is_row, rows.T, True, axis=0)
  q = np.where(is_row[:, :, None], q, -q)
  k, v = (np.where(seen[:, :, None], x, -2 * x) for x in (k, v))
  dout = np.where(is_row[:, :, None], dout, 0).astype(dout.dtype)
  return q, k.astype(q.dtype), v.astype(q.dtype), dout, dlse * is_row


def _at(x, rows):
  """Rows of an array: [B, rows, H, ...]."""
  heads = np.arange(len(rows))[:, None]
  return np.swapaxes(x[:, rows, heads], 1, 2)


def _by_head(function, *arrays):
  """Results of function(head, *arrays of this head), for all heads."""
  of_heads = [
    function(i, *(x[:, :, i : i + 1] for x in arrays))
    for i in range(arrays[0].shape[2])
  ]
  return [np.concatenate(xs, 2) for xs in zip(*of_heads, strict=True)]


def _reference_of_rows(pattern, rows, q, k, v, dout, dlse):
  """out, lse and dq of some rows of a head; dk and dv, to which they add."""
  of_groups, at = [], np.arange(k.shape[1])
  dk, dv = np.zeros(k.shape), np.zeros(v.shape)
  for group in np.array_split(rows, GROUPS):
    mask = _pairs(pattern, group, at)
    keys = np.flatnonzero(mask.any(0) | (at == 0))  # one at least
    q_, dout_, dlse_ = (x[:, group] for x in (q, dout, dlse))
    k_, v_ = k[:, keys], v[:, keys]
    *of_group, dk_, dv_ = laws.reference_of_mask(
      mask[:, keys], q_, k_, v_, dout_, dlse_
    )
    of_groups.append(of_group)
    dk[:, keys] += dk_
    dv[:, keys] += dv_
  return *(np.concatenate(xs, 1) for xs in zip(*of_groups, strict=True)), dk, dv


def _reference_of_keys(pattern, keys, q, k, v, dout, dlse, out, lse):
  """dk and dv of some keys of a head, from all rows that see them.

  Output and lse are those of the executor: the exact ones of all rows would
  take n x n products.
  """
  of_groups, at = [], np.arange(q.shape[1])
  for group in np.array_split(keys, GROUPS):
    mask = _pairs(pattern, at, group)
    rows = np.flatnonzero(mask.any(1))
    q_, dout_, dlse_, *known = (x[:, rows] for x in (q, dout, dlse, out, lse))
    *_, dk, dv = laws.reference_of_mask(
      mask[rows], q_, k[:, group], v[:, group], dout_, dlse_, known=known
    )
    of_groups.append((dk, dv))
  return [np.concatenate(xs, 1) for xs in zip(*of_groups, strict=True)]


def _effects_outside(questions, first, isolated):
  """What depends on pairs outside the pattern, or lacks some of its pairs."""
  rows, seen = questions.rows, questions.seen
  faults = [
    f"{name} depends on keys outside the pattern"
    for name, a, b in zip(laws.NAMES[:3], first, isolated, strict=False)
    if not np.array_equal(_at(a, rows), _at(b, rows))
  ]
  _, _, dq, dk, dv = isolated
  others = np.ones(seen.shape, bool)
  np.put_along_axis(others, rows.T, False, axis=0)
  unseen = ("dq", dq, others), ("dk", dk, ~seen), ("dv", dv, ~seen)
  for name, x, where in unseen:
    if x[:, where].any():
      faults.append(f"{name} is not zero outside the pattern")
  # There, no weight is so small that it would be rounded to zero.
  if not dv[BALANCED, seen].any(1).all():
    faults.append("dv lacks pairs of the pattern")
  return faults


def _errors(questions, first, isolated):
  of_rows, of_all = questions.of_rows, questions.of_all
  # Gradients of a few rows may all be nearly zero, with the rounding errors of
  # what cancels: relative to those of all rows, if these are known.
  rows = [_at(x, questions.rows) for x in isolated[:3]] + isolated[3:]
  compared = [(laws.NAMES, rows, of_rows, of_all or of_rows)]
  if of_all is not None:
    compared.append((laws.NAMES, first, of_all, of_all))
  else:
    heads, keys = questions.mix.heads, questions.rows
    expected = _by_head(
      lambda i, *arrays: _reference_of_keys(heads[i], keys[i], *arrays),
      *(*questions.inputs, *first[:2]),
    )
    found = [_at(x, keys) for x in first[3:]]
    compared.append((laws.NAMES[3:], found, expected, expected))
  errors = dict.fromkeys(laws.NAMES, 0.0)
  for names, *arrays in compared:
    for name, *of_name in zip(names, *arrays, strict=True):
      # Not `max`, which may drop what is not a number.
      errors[name] = float(np.maximum(errors[name], _error(name, *of_name)))
  return errors


def _error(name, x, y, scale):
  axes = (1, *range(3, y.ndim))
  error = np.abs(x.astype(np.float64) - y).max(axes)
  if name != "lse":
    error /= np.maximum(np.abs(scale).max(axes), 1e-6)
  return float((error / np.array(ALLOWED)[:, None]).max())
