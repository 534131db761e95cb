"""The executor that calls cuDNN's attention, for what `divide` makes dense."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from sparse_transformer.attention import contract, platforms
from sparse_transformer.attention.contract import Case, Plan, Plans
from sparse_transformer.attention.heads import heads_of_parts
from sparse_transformer.patterns import Pattern, catalogue, shorten

DTYPES = "bfloat16", "float16"
MIN_CAPABILITY = 8.0  # Ampere
MULTIPLE, MAX_WIDTH = 8, 128  # widths of heads; others are padded
MAX_SEQUENCES = 2**16 - 1  # blocks of threads along an axis of a grid
TILE = 128  # for estimates: cuDNN does not say which it takes


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Sequences:
  """How positions are divided into sequences of equal length.

  Blocks become more sequences of the batch and columns more heads, so that
  nothing is copied. The last positions may be padding.
  """

  blocks: int
  length: int
  columns: int
  causal: bool = True
  window: int = 0  # keys up to the query that it attends to; 0 for all


def divide(part: Pattern, n: int) -> Sequences | None:
  """The sequences in which a part is dense; None if it is not.

  JAX has gradients of even lengths only. If later keys are masked, padding at
  the end is never seen.
  """
  even = lambda x: x + x % 2
  match part:
    case catalogue.Causal():
      return Sequences(1, even(n), 1)
    case catalogue.Full():
      return Sequences(1, n, 1, causal=False)
    case catalogue.Local(window, causal=True):
      return Sequences(1, even(n), 1, window=window)
    case catalogue.Dilated(window, stride, causal=True):
      return Sequences(1, even(-(-n // stride)), stride, window=window)
    case catalogue.Strided(stride, 0, causal=True):
      return Sequences(1, even(-(-n // stride)), stride)
    case catalogue.Block(size, 0, causal=True):
      return Sequences(-(-n // size), min(size, n), 1)
  return None


@dataclasses.dataclass(frozen=True)
class Cudnn(contract.Executor):
  """Runs heads whose patterns have one part each, which is dense."""

  implementation: str = "cudnn"  # "xla" runs the same on any platform

  def unsupported(self, case: Case) -> str | None:
    if case.others:
      return f"it does not have {', '.join(case.others)}"
    if case.tile:
      return "its tiles cannot be chosen"
    if not case.patterns:
      return "no pattern is given"
    for pattern in dict.fromkeys(case.patterns):
      first, *more = pattern.parts()
      found = None if more else divide(first, case.length)
      if found is None:
        return f"{shorten(pattern)} is not dense in an order of positions"
      rows = contract.number(case.batch) * found.blocks
      if max(rows, case.num_heads * found.columns) > MAX_SEQUENCES:
        return f"{shorten(pattern)} has more than {MAX_SEQUENCES} sequences"
      if found.length % 2 and self.implementation == "cudnn":
        return f"{shorten(pattern)} has sequences of odd length"
    if self.implementation == "xla":
      return None
    if case.platform != "cuda":
      return "it needs an NVIDIA GPU"
    if any(x < MIN_CAPABILITY for x in platforms.compute_capabilities()):
      return f"it needs compute capability {MIN_CAPABILITY} or later"
    if case.dtype not in DTYPES:
      return f"its dtypes are {', '.join(DTYPES)}, got {case.dtype}"
    if (width := max(case.qk_width, case.value_width)) > MAX_WIDTH:
      return f"widths of heads must be at most {MAX_WIDTH}, got {width}"
    return None

  def tile_size(self, part: Pattern, case: Case) -> int:
    del part
    return contract.fit_tile(TILE, case.length)

  def plans(self, patterns: tuple[Pattern, ...], case: Case) -> Plans:
    return [
      (Plan(part, TILE, divide(part, case.length)), heads)
      for part, heads in heads_of_parts(patterns, case.length)
    ]

  def forward(
    self, plan: Plan, queries: contract.Queries, keys: contract.Keys
  ) -> tuple[jax.Array, jax.Array]:
    """The log-sum-exp is 0: no head has other plans, and no caller asks."""
    lse_BLH = jnp.zeros_like(queries.q[..., 0], jnp.float32)
    return self._vjp(plan, queries, keys)[0], lse_BLH

  def backward(
    self, plan: Plan, queries: contract.Queries, keys: contract.Keys
  ) -> tuple[jax.Array, ...]:
    return self._vjp(plan, queries, keys)[1](queries.dout)

  def _vjp(self, plan, queries, keys):
    """In both passes: XLA runs the forward pass of a recomputed block once."""
    attend = functools.partial(self._attend, plan)
    return jax.vjp(attend, queries.q, keys.k, keys.v)

  def _attend(self, plan, q_BLHK, k_BMGK, v_BMGE):
    (b, n, h, k), e = q_BLHK.shape, v_BMGE.shape[-1]
    of, width = plan.tables, -(-max(k, e) // MULTIPLE) * MULTIPLE
    num = of.blocks * of.length * of.columns

    def divide(x):
      more = (0, 0), (0, num - n), (0, 0), (0, width - x.shape[-1])
      return jnp.pad(x, more).reshape(b * of.blocks, of.length, -1, width)

    out = jax.nn.dot_product_attention(  # type: ignore[call-overload]
      *map(divide, (q_BLHK, k_BMGK, v_BMGE)),
      scale=plan.scores.factor(k),
      is_causal=of.causal,
      local_window_size=(of.window - 1, 0) if of.window else None,
      implementation=self.implementation,
    )
    return out.reshape(b, num, h, width)[:, :n, :, :e]
