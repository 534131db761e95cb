"""The executors that parts about attention run."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.accelerator.child import Settings
from sparse_transformer.attention import platforms, registry
from sparse_transformer.attention.contract import Case
from sparse_transformer.patterns import Causal

LAST = "dense", "streamed"  # slow on accelerators
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


def names(asked: Sequence[str] = ()) -> list[str]:
  """The executors that were asked for; first what `auto` takes, and cuDNN's."""
  _, *known = registry.backends()
  for name in asked:
    if name not in known:
      raise ValueError(f"unknown executor {name!r}; known: {', '.join(known)}")
  first = registry.resolve("auto", usual("bfloat16"))
  rank = lambda name: (name != first, name != CUDNN, name in LAST)
  return sorted(asked or known, key=rank)


def passes(attention) -> dict:
  """{name: jitted function of q, k, v, dout} of an attention (q, k, v)."""

  def forward(q, k, v, dout):
    return attention(q, k, v)

  def forward_backward(q, k, v, dout):
    out, vjp = jax.vjp(attention, q, k, v)
    return out, *vjp(dout)

  both = jax.jit(forward_backward)
  return {"forward": jax.jit(forward), "forward_backward": both}
