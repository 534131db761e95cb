"""Measures all backends against dense causal attention.

An entry is a pattern at a size. Either it measures the backend that `auto`
chooses alternately with JAX's own dense attention (cuDNN's on NVIDIA GPUs), or
it measures another program alone. On GPUs, FlashAttention-4 is included if
fa4-jax is installed. TFLOP/s count only the products for pairs of the pattern,
so they are lower for a backend that also computes other pairs.
"""

import functools
import importlib.util
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.accelerator import backends
from benchmarks.accelerator.child import Settings, attempt
from benchmarks.accelerator.summary import RIVAL
from benchmarks.report import FLOPS
from sparse_transformer import patterns
from sparse_transformer.attention import attend, platforms

HEADS, WIDTH = 8, 64
# (n, batch, pattern), the most informative first.
CASES = (
  (12_288, 4, "Local(128) | Strided(128)"),
  (3072, 16, "Local(96) | Strided(96)"),
  (65_536, 1, "Block(256) | Summary(256, 32)"),
  (12_288, 4, "Block(128) | Summary(128, 32)"),
  (12_288, 4, "Causal()"),
  (65_536, 1, "Local(256) | Strided(256)"),
  (12_288, 4, "Local(128)"),
  (12_288, 4, "BigBird(block=64)"),
  (3072, 16, "Causal()"),
  (65_536, 1, "Causal()"),
)
SMALL_CASES = (256, 1, "Local(16)"), (256, 1, "Block(16) | Summary(16, 4)")
FLASH = "FlashAttention-4"  # dense causal
# If a forward pass takes more than this many seconds, the backward pass is not
# measured.
TOO_SLOW = 10


def entries(settings: Settings) -> dict:
  """Returns entries for the backend of `auto`, then others, then FLASH."""
  names = backends.names(settings.backends)
  first = [x for x in names if x in (names[0], backends.CUDNN)]
  others = [x for x in names if x not in first]
  cases = SMALL_CASES if settings.small else CASES
  programs = {"": [RIVAL, *first]} | {f", {name}": [name] for name in others}
  on_gpu = platforms.current_platform() == "cuda"
  if on_gpu and importlib.util.find_spec("fa4_jax"):
    programs[f", {FLASH}"] = [FLASH]
  return {
    f"n = {n}, batch {batch}, {text}{title}": functools.partial(
      measure, of_entry, n, batch, text
    )
    for title, of_entry in programs.items()
    for n, batch, text in cases
  }


def measure(names: list[str], n: int, batch: int, text: str) -> dict:
  dtype = "bfloat16" if platforms.current_platform() != "cpu" else "float32"
  ((pattern,),) = patterns.parse(text)
  keys = jax.random.split(jax.random.key(0), 4)
  shape = batch, n, HEADS, WIDTH
  inputs = [jax.random.normal(key, shape, jnp.dtype(dtype)) for key in keys]
  functions, warm = {}, {}

  def prepare(name):
    for kind, run in backends.passes(program(name, pattern)).items():
      if warm.get((name, "forward"), 0) > TOO_SLOW:
        raise ValueError("too slow for more than a forward pass")
      function = functools.partial(run, *inputs)
      warm[name, kind] = timing.warm_up(function)
      functions[name, kind] = function
    return {}

  rows = {name: attempt(functools.partial(prepare, name)) for name in names}
  for (name, kind), times in timing.interleave(functions, warm).items():
    pairs = n * (n + 1) // 2 if name in (RIVAL, FLASH) else pattern.pairs(n)
    flops = FLOPS[kind] * batch * HEADS * pairs * WIDTH
    rows[name][kind] = times | {"tflops": flops / times["median"] / 1e12}
  if len(rows) == 1 and not functions:
    return rows[names[0]]
  found = dict(n=n, batch=batch, heads=HEADS, width=WIDTH, dtype=dtype)
  found |= dict(pattern=text, programs=rows)
  for name, row in rows.items():
    # A failure of JAX's own attention is not a failure of this code.
    if name == RIVAL and "failed" in row:
      row["skipped"] = row.pop("failed")
    elif "failed" in row:
      found["failed"] = f"{name}: {row['failed']}"
  return found


def program(name: str, pattern: patterns.Pattern) -> Callable:
  """Returns the attention of a backend, or others' dense causal attention."""
  if name == FLASH:
    import fa4_jax

    return functools.partial(fa4_jax.flash_attn, causal=True)
  if name == RIVAL:
    on_gpu = platforms.current_platform() == "cuda"
    options = dict(implementation="cudnn" if on_gpu else "xla", is_causal=True)
    return functools.partial(jax.nn.dot_product_attention, **options)
  return functools.partial(attend, patterns=pattern, backend=name)
