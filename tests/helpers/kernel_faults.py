"""Backends of the CPU that are wrong, each in one of the ways of a kernel.

python tests/helpers/kernel_faults.py NAMES FLAGS: train.py with some of them.
"""

import dataclasses
import functools
import os
import pathlib
import signal
import sys
import time

import jax
import jax.numpy as jnp
from helpers import processes

from sparse_transformer.attention import registry
from sparse_transformer.attention.backends.xla import Xla
from sparse_transformer.patterns import Pattern
from sparse_transformer.training import kernel_check


@dataclasses.dataclass(frozen=True)
class Edge(Pattern):
  def mask(self, q, k):
    return (q == 20) & (k == 21)


def unlowered(x):
  """x, from a primitive that no platform has."""
  primitive = jax.extend.core.Primitive("unlowered")
  primitive.def_abstract_eval(lambda x: x)
  return primitive.bind(x)


def calling(function, x):
  """x, after a call of a function when the program runs."""

  def call(x):
    function()
    return x

  return jax.pure_callback(call, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def fail(words="illegal address"):
  raise RuntimeError(words)


def hang():
  """Winds the clock of the check forward, if there is one, and hangs."""
  if signal.alarm(0):
    signal.alarm(1)
  time.sleep(1200)


LSE = {
  "lse": lambda x: x + 1e-3,
  "lowering": unlowered,
  "run_time": functools.partial(calling, fail),
  "memory": functools.partial(calling, lambda: fail("Out of memory: 9 G")),
  "hang": functools.partial(calling, hang),
  "crash": functools.partial(calling, lambda: signal.raise_signal(11)),
}


@dataclasses.dataclass(frozen=True)
class Faulty(Xla):
  name: str = ""

  def plans(self, request):
    if self.name == "edge":
      patterns = tuple(x | Edge() for x in request.patterns)
      request = dataclasses.replace(request, patterns=patterns)
    return super().plans(request)

  def forward(self, *args):
    out, lse = super().forward(*args)
    return out, LSE.get(self.name, lambda x: x)(lse)

  def backward(self, *args):
    dq, dk, dv, *rest = super().backward(*args)
    if self.name == "gradient":
      dv = dv.at[0, 5, 0, 0].set(jnp.nan)
    return dq, dk, dv, *rest


def register(*names):
  for name in names:
    registry.register(name, Faulty(name=name), platforms=("cpu",))


def main():
  register(*sys.argv[1].split(","))
  # A driver that no verdict is known of.
  kernel_check.DRIVER = pathlib.Path(os.environ["DRIVER"])
  sys.argv[:2] = ["", "0", "0"]
  processes.main()


if __name__ == "__main__":
  main()
