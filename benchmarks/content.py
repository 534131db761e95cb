"""Measures attention that follows the content, and with learned spans.

  python -m benchmarks.content [--length=N] [--rounds=N] [--only=TEXT] [--out=F]

Batch 1, 4 heads of 64, float32, forward and backward, all gradients.
`AdaptiveSpan` is compiled once, and run with several spans. See
`turns.measure`.
"""

import argparse
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp

from benchmarks import record, turns
from sparse_transformer import patterns
from sparse_transformer.attention import attend
from sparse_transformer.patterns import AdaptiveSpan, Routing

HEADS, WIDTH, RAMP = 4, 64, 32
FOLLOWING = (
  "Causal()",
  "Local(128)",
  "LSH(64, 192)",
  "LSH(64, 192, 4)",
  "Routing(64, 128)",
  "TopBlocks(64, 8)",
  "Block(64) | TopBlocks(64, 8)",
)
SPANS = 0, 64, 1024, 4096


@functools.cache
def step(pattern):
  """A compiled function of (q, k, v, directions, dout): the gradients."""

  def loss(q, k, v, directions, dout):
    out = attend(q, k, v, pattern, directions=directions)
    return (out * dout).sum()

  return jax.jit(jax.grad(loss, (0, 1, 2, 3)))


def cases(n, q, k, v, dout):
  """(name, compiled function, arguments)."""
  for text in FOLLOWING:
    pattern = patterns.parse(text)[0][0]
    directions = {
      content: jax.random.normal(
        jax.random.key(1), (HEADS, content.num_directions, WIDTH)
      )
      for content in pattern.contents()
      if isinstance(content, Routing)
    }
    yield text, step(pattern), (q, k, v, directions, dout)
  adaptive = AdaptiveSpan(n, RAMP)
  for span in (*SPANS, n):
    spans = jnp.full(HEADS, min(span, n), jnp.float32)
    arrays = q, k, v, {adaptive: spans}, dout
    yield f"{adaptive}, spans of {span:,}", step(adaptive), arrays


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--length", type=int, default=12_288)
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--only", default="", help="cases with this text")
  parser.add_argument(
    "--out", type=pathlib.Path, default=record.FOLDER / "content.json"
  )
  args = parser.parse_args()
  keys = jax.random.split(jax.random.key(0), 4)
  shape = 1, args.length, HEADS, WIDTH
  arrays = [jax.random.normal(key, shape) for key in keys]
  content = record.about("python -m benchmarks.content", sys.argv[1:])
  first, *others = cases(args.length, *arrays)
  chosen = [first, *(case for case in others if args.only in case[0])]
  rows = turns.measure(chosen, args.rounds)
  record.write(args.out, content | dict(length=args.length, rows=rows))


if __name__ == "__main__":
  main()
