"""Times of all executors against dense causal attention.

An entry is a pattern at a size, whose programs take turns: the executors, JAX's
own dense attention, which on NVIDIA GPUs is cuDNN's, and FlashAttention-4 there
if fa4-jax is installed. TFLOP/s count the matrix products of the pattern's
pairs, so that an executor that computes pairs outside the pattern shows fewer.
"""

import functools
import importlib.util
from collections.abc import Callable

import jax

from benchmarks import timing
from benchmarks.accelerator import executors
from benchmarks.accelerator.child import Settings
from benchmarks.accelerator.summary import DENSE
from benchmarks.report import FLOPS
from sparse_transformer import patterns
from sparse_transformer.attention import platforms

HEADS, WIDTH = 8, 64
# (n, batch, pattern), those that say most first.
CASES = (
  (12_288, 4, "Local(128) | Strided(128)"),
  (3072, 16, "Local(96) | Strided(96)"),
  (65_536, 1, "Block(256) | Summary(256, 32)"),
  (12_288, 4, "Block(128) | Summary(128, 32)"),
  (12_288, 4, "Causal()"),
  (65_536, 1, "Local(256) | Strided(256)"),
  (12_288, 4, "Local(128)"),
  (12_288, 4, "Strided(128)"),
  (12_288, 4, "BigBird(block=64)"),
  (3072, 1, "Local(96) | Strided(96)"),
  (3072, 16, "Causal()"),
  (65_536, 1, "Causal()"),
)
SMALL_CASES = (256, 1, "Local(16)"), (256, 1, "Block(16) | Summary(16, 4)")
FLASH = "FlashAttention-4"  # dense causal
TOO_SLOW = 10  # seconds of a forward pass


def entries(settings: Settings) -> dict:
  """For each case what `auto` takes, then the others, then FlashAttention-4."""
  names = executors.names(settings.executors)
  first = [x for x in names if x in (names[0], executors.CUDNN)]
  others = [x for x in names if x not in first]
  cases = SMALL_CASES if settings.small else CASES
  programs = {"": [DENSE, *first], ", others": others}
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
  platform = platforms.current_platform()
  dtype = "float32" if platform == "cpu" else "bfloat16"
  ((pattern,),) = patterns.parse(text)
  found = dict(n=n, batch=batch, heads=HEADS, width=WIDTH, dtype=dtype)
  found |= dict(pattern=text, pairs=HEADS * pattern.pairs(n))
  rows: dict[str, dict] = {}
  functions, warm = {}, {}
  inputs = executors.random_inputs(batch, n, HEADS, WIDTH, dtype=dtype)
  for name in names:
    sizes = batch, n, (pattern,) * HEADS, (WIDTH, WIDTH)
    if name in (DENSE, FLASH):
      made = executors.passes(dense(name, platform))
      rows[name] = _warm_up(name, made, inputs, functions, warm)
    elif reason := executors.unsupported(name, *sizes, dtype):
      rows[name] = {"skipped": reason}
    else:
      made = executors.of_executor(name, (pattern,) * HEADS)
      rows[name] = _warm_up(name, made, inputs, functions, warm)
  for (name, kind), times in timing.interleave(functions, warm).items():
    rows[name][kind] = times
  for name, row in rows.items():
    _add_rates(row, found, name in (DENSE, FLASH))
    if "failed" in row:
      found["failed"] = f"{name}: {row['failed']}"
  return found | {"programs": rows}


def _warm_up(name, runs, inputs, functions, warm):
  """The row of a program: its times, which go to warm too, or why it failed."""
  row = {}
  try:
    for kind, run in runs.items():
      if warm.get((name, "forward"), 0) > TOO_SLOW:
        raise ValueError("too slow for more than a forward pass")
      function = functools.partial(run, *inputs)
      warm[name, kind] = timing.warm_up(function)
      functions[name, kind] = function
      row[kind] = timing.spread([warm[name, kind]])
  except Exception as error:  # the other programs run on
    kind = "skipped" if name == DENSE else "failed"  # may lack memory
    row[kind] = " ".join(str(error).split())[:300]
  return row


def _add_rates(row, about, is_dense):
  n = about["n"]
  pairs = about["heads"] * n * (n + 1) // 2 if is_dense else about["pairs"]
  for kind, per_pair in FLOPS.items():
    if kind in row:
      flops = about["batch"] * pairs * per_pair * about["width"]
      row[kind]["tflops"] = flops / row[kind]["median"] / 1e12


def dense(name: str, platform: str) -> Callable:
  """The dense causal attention of another library."""
  if name == FLASH:
    import fa4_jax

    return functools.partial(fa4_jax.flash_attn, causal=True)
  options = dict(implementation="cudnn" if platform == "cuda" else "xla")
  attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
  return functools.partial(attend, **options)
