"""Measures mixtures of experts beside a dense MLP of the same FLOPs.

  python -m benchmarks.experts [--tokens=N] [--rounds=N] [--only=TEXT] [--out=F]

Each token passes through 2 experts, 256 to 1,024 to 256 wide, or through an MLP
with twice the inner width; float32, forward and backward, all gradients. Those
of experts include the choice by a router.
"""

import functools

import jax
import jax.numpy as jnp

from benchmarks import record, timing
from sparse_transformer.model import experts

WIDTH, INNER, PER_TOKEN = 256, 1024, 2
NUMBERS = 8, 32


def normal(*shape):
  return jax.random.normal(jax.random.key(0), shape) / shape[-1] ** 0.5


def of_mlp(x_BLD, dout_BLD, kernel_in, bias_in, kernel_out, bias_out):
  """The output of a dense MLP, times given numbers."""
  h_BLF = experts.activate(x_BLD @ kernel_in + bias_in[None, None])
  return ((h_BLF @ kernel_out + bias_out[None, None]) * dout_BLD).sum()


def of_experts(x_BLD, dout_BLD, router, *weights):
  """The same of a mixture of experts."""
  chosen_BLK, factors_BLK = experts.choose(x_BLD @ router, PER_TOKEN)
  weights = experts.Weights(*weights)
  out_BLD = experts.mix(x_BLD, chosen_BLK, factors_BLK, weights)
  return (out_BLD * dout_BLD).sum()


def cases(tokens):
  x_BLD = normal(1, tokens, WIDTH)
  dout_BLD = x_BLD[:, ::-1]

  def case(name, function, *weights):
    numbers = tuple(range(len(weights) + 2))
    gradients = jax.jit(jax.grad(function, numbers[:1] + numbers[2:]))
    return name, gradients, (x_BLD, dout_BLD, *weights)

  inner = PER_TOKEN * INNER
  dense = normal(WIDTH, inner), normal(inner), normal(inner, WIDTH)
  yield case("dense", of_mlp, *dense, normal(WIDTH))
  for num in NUMBERS:
    of_each = functools.partial(normal, num)
    weights = of_each(WIDTH, INNER), of_each(INNER), of_each(INNER, WIDTH)
    name = f"{PER_TOKEN} of {num} experts"
    yield case(
      name, of_experts, normal(WIDTH, num), *weights, jnp.zeros((num, WIDTH))
    )


@record.as_table
def table(found):
  yield f"MLP, {found['tokens']:,} tokens of width 256", "ms", "times dense"
  for x in found["rows"]:
    yield x["case"], f"{x['milliseconds']:,.0f}", f"{1 / x['speed_up']:.2f}"


if __name__ == "__main__":
  timing.main("experts", __doc__, cases, table, tokens=4096)
