"""Times of all executors against dense causal attention.

An entry is a pattern at a size: what `auto` runs and the dense attention,
interleaved. Each other executor is an entry of a later rank, and so is torch's
FlexAttention, in a separate process. TFLOP/s count the matrix products of the
pattern's pairs, so that an executor that computes pairs outside the pattern
shows fewer.
"""

import dataclasses
import functools
import importlib.util
import json
import subprocess
import sys

import jax

from benchmarks import timing
from benchmarks.accelerator import cases
from benchmarks.accelerator.parts import DENSE, RANKS, Settings
from benchmarks.record import REPO
from benchmarks.report import FLOPS
from benchmarks.worker import Entry
from sparse_transformer import machine, patterns
from sparse_transformer.attention import registry

HEADS, WIDTH = 8, 64
# {n: (stride of the patterns, batches)}
SIZES = {3072: (96, (1, 16)), 12_288: (128, (1, 4)), 65_536: (256, (1,))}
SMALL_SIZES = {256: (16, (1,))}
EXPRESSIONS = {
  "local": "Local({l})",
  "strided": "Strided({l})",
  "local | strided": "Local({l}) | Strided({l})",
  "block | summary": "Block({l}) | Summary({l}, 32)",
  "bigbird": "BigBird(block=64)",
  "causal": "Causal()",
}
SMALL_EXPRESSIONS = {
  "local": "Local({l})",
  "block | summary": "Block({l}) | Summary({l}, 4)",
}
TOO_SLOW = 10  # seconds of a forward pass
FLEX, FLEX_SECONDS = "torch flex", 50  # the most that it may take, compiled
# Sizes and patterns that say most, which come first.
FIRST = (
  "n = 12288, batch 4, local | strided",
  "n = 3072, batch 16, local | strided",
  "n = 65536, batch 1, block | summary",
  "n = 12288, batch 4, heads of enwik8",
  "n = 12288, batch 4, causal",
)


def entries(settings: Settings, rank: int) -> dict:
  """One for each size and pattern and, after the first rank, executor."""
  sizes = SMALL_SIZES if settings.small else SIZES
  found = {
    f"n = {n}, batch {batch}, {title}": (batch, n, heads)
    for n, (stride, batches) in sizes.items()
    for batch in batches
    for title, heads in mixes(stride, settings.small).items()
  }
  first = {name: found[name] for name in FIRST if name in found}
  programs = cases.executors(settings, rank)
  titles = {"": [DENSE, *programs]}
  if rank > 0:
    programs += [FLEX] * (rank == RANKS - 1)
    titles = {f", {program}": [program] for program in programs}
  return {
    name + title: functools.partial(measure, programs, *case)
    for title, programs in titles.items()
    for name, case in (first | found).items()
  }


def mixes(stride: int, small: bool) -> dict:
  """{title: pattern of each head}."""
  found = {}
  for title, text in (SMALL_EXPRESSIONS if small else EXPRESSIONS).items():
    ((pattern,),) = patterns.parse(text.format(l=stride))
    found[title] = (pattern,) * HEADS
  if not small:
    num = min(4, stride // 32)
    settings = dict(stride=stride, window=stride, width=32, num_summaries=num)
    (found["heads of enwik8"],) = patterns.assign(
      "fixed", "merged", num_layers=1, num_heads=HEADS, **settings
    )
  return found


def measure(names: list[str], batch: int, n: int, heads: tuple, record) -> dict:
  platform = registry.current_platform()
  found = dict(n=n, batch=batch, heads=HEADS, width=WIDTH)
  found["dtype"] = dtype = "float32" if platform == "cpu" else "bfloat16"
  found["pairs"] = sum(pattern.pairs(n) for pattern in heads)
  found["patterns"] = [str(pattern) for pattern in dict.fromkeys(heads)]
  found["programs"] = rows = {}
  if names == [FLEX]:
    rows[FLEX] = row = _flex(platform, batch, n, heads, dtype)
    return row if "skipped" in row else _with_rates(found)
  programs, sizes = {}, (batch, n, HEADS, (WIDTH, WIDTH))
  for name in names:
    if name == DENSE:
      programs[name] = functools.partial(_dense, batch, n, platform)
    elif reason := cases.unsupported(name, *sizes, dtype):
      rows[name] = {"skipped": reason}
    else:
      programs[name] = functools.partial(cases.of_executor, name, heads)
  if not programs:
    return {"skipped": reason}
  inputs = cases.random_inputs(batch, n, HEADS, WIDTH, dtype=dtype)
  functions, warm = {}, {}
  for name, make in programs.items():
    rows[name] = _warm_up(name, make, inputs, functions, warm)
    record(_with_rates(found))
  for (name, kind), times in timing.interleave(functions, warm).items():
    rows[name][kind] = times
  for name in programs:
    if name != DENSE and "failed" in rows[name]:
      found["failed"] = f"{name}: {rows[name]['failed']}"
  return _with_rates(found)


def _warm_up(name, make, inputs, functions, warm):
  """The row of a program: its times, which go to warm too, or why it failed."""
  row = {}
  try:
    for kind, run in make().items():
      if warm.get((name, "forward"), 0) > TOO_SLOW:
        raise ValueError("too slow for more than a forward pass")
      function = functools.partial(run, *inputs)
      warm[name, kind] = timing.warm_up(function)
      functions[name, kind] = function
      row[kind] = timing.spread([warm[name, kind]])
  except Exception as error:  # the other programs run on
    row["failed"] = " ".join(str(error).split())[:300]
  return row


def _with_rates(found):
  """The results, with TFLOP/s added."""
  n, programs = found["n"], found["programs"]
  causal = found["heads"] * n * (n + 1) // 2
  for name, row in programs.items():
    pairs = causal if name == DENSE else found["pairs"]
    for kind, per_pair in FLOPS.items():
      if kind in row:
        flops = found["batch"] * pairs * per_pair * found["width"]
        row[kind]["tflops"] = flops / row[kind]["median"] / 1e12
  return found


def _dense(batch, n, platform):
  """The passes of JAX's own attention: cuDNN's on NVIDIA GPUs."""
  implementation = "cudnn" if platform == "cuda" else "xla"
  # XLA stores scores and weights, and their gradients, in float32.
  needed, memory = 16 * batch * HEADS * n**2, machine.device_memory()
  if implementation == "xla" and memory and needed > memory / 2:
    raise ValueError(f"its scores would take {needed / 2**30:.3g} GiB")
  attend = jax.nn.dot_product_attention
  return cases.passes(
    functools.partial(attend, is_causal=True, implementation=implementation)
  )


def _flex(platform, batch, n, heads, dtype):
  if platform != "cuda" or importlib.util.find_spec("torch") is None:
    return {"skipped": "it needs an NVIDIA GPU and torch"}
  if len(set(heads)) > 1:
    return {"skipped": "heads have different patterns"}
  entry = Entry("flex", str(heads[0]), n, batch, HEADS, WIDTH, dtype)
  words = "-m", "benchmarks.peers", json.dumps(dataclasses.asdict(entry))
  try:
    done = subprocess.run(
      [sys.executable, *words],
      cwd=REPO,
      capture_output=True,
      text=True,
      timeout=FLEX_SECONDS,
    )
    return json.loads(done.stdout.splitlines()[-1])
  except subprocess.TimeoutExpired:
    return {"failed": f"it took more than {FLEX_SECONDS} seconds"}
  except (IndexError, ValueError):
    lines = done.stderr.strip().splitlines() or ["no message"]
    return {"failed": lines[-1][:300]}
