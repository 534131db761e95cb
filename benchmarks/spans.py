"""Measures attention with learned spans: one compiled program, several spans.

  python -m benchmarks.spans [--length=N] [--rounds=N] [--out=F]

Batch 1, 4 heads of 64, float32, forward and backward, all gradients: processor
times, the least of the rounds. `AdaptiveSpan(n)` is compiled once, and run with
other spans; `Causal()` and `Local` are there to compare.
"""

import argparse
import pathlib
import sys
import time

import jax
import jax.numpy as jnp

from benchmarks import record
from sparse_transformer.attention import attend
from sparse_transformer.patterns import AdaptiveSpan, Causal, Local

HEADS, WIDTH, RAMP = 4, 64, 32


def step(pattern):
  """A compiled function of (q, k, v, spans, dout): the gradients."""

  def loss(q, k, v, spans, dout):
    directions = {content: spans for content in pattern.contents()}
    return (attend(q, k, v, pattern, directions=directions) * dout).sum()

  return jax.jit(
    jax.grad(loss, (0, 1, 2, 3) if pattern.contents() else (0, 1, 2))
  )


def cases(n):
  """(name, function, spans); those with spans are one function."""
  adaptive = AdaptiveSpan(n, RAMP)
  program = step(adaptive)
  yield str(Causal()), step(Causal()), None
  yield str(Local(64 + RAMP)), step(Local(64 + RAMP)), None
  for spans in ([64] * 4, [1024] * 4, [n] * 4, [0, 16, 64, 1024]):
    array = jnp.array(spans, jnp.float32).clip(0, n)
    yield f"{adaptive}, spans {spans}", program, array


def milliseconds(function, *arrays):
  """Processor time of one run."""
  start = time.process_time()
  jax.block_until_ready(function(*arrays))
  return 1e3 * (time.process_time() - start)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--length", type=int, default=4096)
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument(
    "--out", type=pathlib.Path, default=record.FOLDER / "spans.json"
  )
  args = parser.parse_args()
  keys = jax.random.split(jax.random.key(0), 4)
  shape = 1, args.length, HEADS, WIDTH
  q, k, v, dout = (jax.random.normal(key, shape) for key in keys)
  rows = []
  for name, function, spans in cases(args.length):
    arrays = q, k, v, spans, dout
    jax.block_until_ready(function(*arrays))  # compiles
    times = [milliseconds(function, *arrays) for _ in range(args.rounds)]
    rows.append(dict(case=name, milliseconds=round(min(times), 1)))
    print(f"{name}: {min(times):.0f} ms", flush=True)
  content = record.about("python -m benchmarks.spans", sys.argv[1:])
  record.write(args.out, content | dict(length=args.length, rows=rows))


if __name__ == "__main__":
  main()
