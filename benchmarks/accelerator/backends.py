"""The backends that the parts about attention run."""

import functools
from collections.abc import Sequence

import jax

from benchmarks.accelerator.child import Settings
from sparse_transformer.attention import Request, platforms, registry
from sparse_transformer.patterns import Causal, Local, Pattern

LAST = "dense", "streamed"  # slow on accelerators
CUDNN = "cudnn"  # chosen by `auto` for some patterns


def request_for(
  patterns: tuple[Pattern, ...],
  n: int,
  *,
  batch: int = 1,
  width: int = 64,
  value_width: int = 0,
  dtype: str,
  lse: bool = False,
) -> Request:
  """Returns a request of `attend`; by default, values are as wide as keys."""
  return Request(
    patterns=patterns,
    batch=batch,
    length=n,
    num_key_heads=len(patterns),
    qk_width=width,
    value_width=value_width or width,
    dtype=dtype,
    value_dtype=dtype,
    platform=platforms.current_platform(),
    lse=lse,
  )


def usual(dtype: str, pattern: Pattern) -> Request:
  """Returns a typical request, with 8 heads of width 64, to choose backends."""
  return request_for((pattern,) * 8, 3072, dtype=dtype)


def of_setup(settings: Settings) -> dict:
  """Returns entries that report the backends for each dtype.

  They report which backends can run heads of width 64, and which one `auto`
  chooses.
  """
  dtypes = "bfloat16", "float32", "float16"
  return {dtype: functools.partial(describe, dtype) for dtype in dtypes}


def describe(dtype: str) -> dict:
  request = usual(dtype, Causal())
  found = {
    name: backend.unsupported(request) or "yes"
    for name, backend in registry.BACKENDS.items()
  }
  return {"auto": registry.resolve("auto", request), "backends": found}


def names(asked: Sequence[str] = ()) -> list[str]:
  """Returns the requested backends, with the choice of `auto` first."""
  _, *known = registry.names()
  for name in asked:
    if name not in known:
      raise ValueError(f"unknown backend {name!r}; known: {', '.join(known)}")
  first = registry.resolve("auto", usual("bfloat16", Local(128)))
  rank = lambda name: (name != first, name != CUDNN, name in LAST)
  return sorted(asked or known, key=rank)


def passes(attention) -> dict:
  """Returns {name: jitted function of q, k, v, dout} for an attention."""

  def forward(q, k, v, dout):
    return attention(q, k, v)

  def forward_backward(q, k, v, dout):
    out, vjp = jax.vjp(attention, q, k, v)
    return out, *vjp(dout)

  both = jax.jit(forward_backward)
  return {"forward": jax.jit(forward), "forward_backward": both}
