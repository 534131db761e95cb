"""What the parts about attention run, and with which executors."""

import jax
import jax.numpy as jnp

from benchmarks.accelerator.parts import RANKS, Settings
from sparse_transformer.attention import attend, registry
from sparse_transformer.attention.contract import Case
from sparse_transformer.attention.executors import dense

REFERENCE = "dense"  # the plain executor, which is not in the registry
SLOW = REFERENCE, "streamed"  # on accelerators
# "triton" chooses between these tiles for each pattern.
WITH_TILES = {"triton": ("triton:64", "triton:128")}


def usual(dtype: str) -> Case:
  """The case by which executors are chosen: 8 heads of 64."""
  return Case(1, 3072, 8, 64, 64, dtype, registry.current_platform())


def executors(settings: Settings, rank: int | None = None) -> list[str]:
  """The names of a rank that were asked for: what `auto` takes has rank 0."""
  first = registry.resolve("auto", usual("bfloat16"))
  last = RANKS - 1
  ranks = {first: 0} | {
    name: last if name in SLOW else 1
    for name in (*registry.EXECUTORS, *WITH_TILES.get(first, ()), REFERENCE)
    if name != first
  }
  for name in settings.executors:
    if name not in ranks:
      raise ValueError(f"unknown executor {name!r}; known: {', '.join(ranks)}")
  return [
    name
    for name in sorted(ranks, key=ranks.__getitem__)
    if name in (settings.executors or ranks) and rank in (None, ranks[name])
  ]


def unsupported(
  name: str, batch: int, n: int, heads: int, widths: tuple, dtype: str
) -> str | None:
  """Why an executor cannot run a case on this machine; None if it can."""
  backend, tile = parse(name)
  platform = registry.current_platform()
  case = Case(batch, n, heads, *widths, dtype, platform, tile)
  executor = dense if backend == REFERENCE else registry.EXECUTORS[backend]
  return executor.unsupported(case)


def parse(name: str) -> tuple[str, int]:
  """(the backend, its tile) of "backend" or "backend:tile"."""
  backend, _, tile = name.partition(":")
  return backend, int(tile or 0)


def random_inputs(*shape: int, dtype: str) -> list[jax.Array]:
  """q, k, v and the cotangent of the output."""
  keys = jax.random.split(jax.random.key(0), 4)
  return [jax.random.normal(key, shape, jnp.dtype(dtype)) for key in keys]


def passes(attention) -> dict:
  """{name: jitted function of q, k, v, dout} of an attention (q, k, v)."""

  def forward(q, k, v, dout):
    del dout
    return attention(q, k, v)

  def forward_backward(q, k, v, dout):
    out, vjp = jax.vjp(attention, q, k, v)
    return out, *vjp(dout)

  both = jax.jit(forward_backward)
  return {"forward": jax.jit(forward), "forward_backward": both}


def of_executor(name: str, heads: tuple) -> dict:
  backend, tile = parse(name)
  return passes(
    lambda q, k, v: attend(q, k, v, heads, backend=backend, tile=tile)
  )
