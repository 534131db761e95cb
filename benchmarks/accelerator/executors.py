"""The executors that parts about attention run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.accelerator.child import Settings
from sparse_transformer.attention import attend, platforms, registry
from sparse_transformer.attention.contract import Case
from sparse_transformer.attention.executors import dense
from sparse_transformer.patterns import Causal, Pattern

REFERENCE = "dense"  # the plain executor, which is not in the registry
LAST = REFERENCE, "streamed"  # slow on accelerators
CUDNN = "cudnn"  # what `auto` takes for some patterns


def usual(dtype: str, **fields: Any) -> Case:
  """The case by which executors are chosen: 8 heads of 64, of any pattern."""
  platform = platforms.current_platform()
  return Case(1, 3072, 8, 64, 64, dtype, platform, **fields)


def of_setup(settings: Settings) -> dict:
  """Which executors run heads of 64 in each dtype; and what `auto` takes."""
  dtypes = "bfloat16", "float32", "float16"
  return {dtype: functools.partial(describe, dtype) for dtype in dtypes}


def describe(dtype: str) -> dict:
  case, every = usual(dtype, patterns=(Causal(),)), registry.EXECUTORS
  found = {name: every[name].unsupported(case) or "yes" for name in every}
  return {"auto": registry.resolve("auto", case), "executors": found}


def names(asked: tuple[str, ...] = ()) -> list[str]:
  """The executors that were asked for; first what `auto` takes, and cuDNN's."""
  first = registry.resolve("auto", usual("bfloat16"))
  known = sorted(
    (*registry.EXECUTORS, REFERENCE),
    key=lambda name: (name != first, name != CUDNN, name in LAST),
  )
  for name in asked:
    if name not in known:
      raise ValueError(f"unknown executor {name!r}; known: {', '.join(known)}")
  return [name for name in known if name in (asked or known)]


def unsupported(
  name: str,
  batch: int,
  n: int,
  heads: tuple[Pattern, ...],
  widths: tuple,
  dtype: str,
  others: tuple[str, ...] = (),
) -> str | None:
  """Why an executor cannot run a case on this machine; None if it can."""
  platform = platforms.current_platform()
  asked: Any = dict(patterns=heads, others=others)
  case = Case(batch, n, len(heads), *widths, dtype, platform, **asked)
  executor = dense if name == REFERENCE else registry.EXECUTORS[name]
  return executor.unsupported(case)


def passes(attention) -> dict:
  """{name: jitted function of q, k, v, dout} of an attention (q, k, v)."""

  def forward(q, k, v, dout):
    return attention(q, k, v)

  def forward_backward(q, k, v, dout):
    out, vjp = jax.vjp(attention, q, k, v)
    return out, *vjp(dout)

  both = jax.jit(forward_backward)
  return {"forward": jax.jit(forward), "forward_backward": both}


def of_executor(name: str, heads: tuple) -> dict:
  return passes(lambda q, k, v: attend(q, k, v, heads, backend=name))


def random_inputs(*shape: int, dtype: str) -> list[jax.Array]:
  keys = jax.random.split(jax.random.key(0), 4)
  return [jax.random.normal(key, shape, jnp.dtype(dtype)) for key in keys]
