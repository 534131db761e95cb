"""Measures attention that follows the content, and with learned spans.

  python -m benchmarks.content [--length=N] [--rounds=N] [--only=TEXT] [--out=F]

Batch 1, 4 heads of 64, float32, forward and backward, all gradients.
`AdaptiveSpan` is compiled once, and run with several spans.
"""

import functools

import jax
import jax.numpy as jnp

from benchmarks import record, timing
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


def cases(length):
  keys = jax.random.split(jax.random.key(0), 4)
  q, k, v, dout = (
    jax.random.normal(x, (1, length, HEADS, WIDTH)) for x in keys
  )
  normal = functools.partial(jax.random.normal, jax.random.key(1))
  for text in FOLLOWING:
    pattern = patterns.parse(text)[0][0]
    directions = {
      content: normal((HEADS, content.num_directions, WIDTH))
      for content in pattern.contents()
      if isinstance(content, Routing)
    }
    yield text, step(pattern), (q, k, v, directions, dout)
  adaptive = AdaptiveSpan(length, RAMP)
  for span in (*SPANS, length):
    spans = jnp.full(HEADS, min(span, length), jnp.float32)
    arrays = q, k, v, {adaptive: spans}, dout
    yield f"{adaptive}, spans of {span:,}", step(adaptive), arrays


@record.as_table
def table(found):
  yield "pattern", "ms", "speed-up over `Causal()`"
  for row in found["rows"]:
    pattern, *spans = row["case"].split(", spans of ")
    name = ", spans of ".join([f"`{pattern}`", *spans])
    yield name, f"{row['milliseconds']:,.0f}", f"{row['speed_up']:.1f}"


if __name__ == "__main__":
  timing.main("content", __doc__, cases, table, length=12_288)
