"""Named factorizations, expressions, and how factors are assigned to layers."""

import ast
import functools
import operator
from collections.abc import Sequence
from typing import Any

from sparse_transformer.patterns.base import Pattern
from sparse_transformer.patterns.catalogue import (
  Block,
  Causal,
  Local,
  Strided,
  Summary,
)
from sparse_transformer.patterns.registry import CATALOGUE

FACTORIZATIONS = (
  "dense",
  "local",
  "strided",
  "fixed",
  "fixed_openai",
  "fixed_deepspeed",
  "fixed_lra",
)
MODES = ("interleaved", "merged", "heads")


def factorize(
  name: str,
  *,
  stride: int,
  window: int,
  width: int,
  num_summaries: int,
  head: int = 0,
) -> tuple[Pattern, ...]:
  """The factors of a named factorization, or of an expression, for one head.

  `dense`, `local`, `strided`, `fixed`: Child et al. 2019, section 4.3. The
  order of factors matters for what two layers reach: fixed attention has its
  block first and its summary second.

  `fixed_openai`, `fixed_deepspeed`, `fixed_lra`: what other codebases call
  fixed, with both factors in one head. In openai/sparse_attention, each head
  has its own summary, counted from the end of the block. DeepSpeed's causal
  pattern is the same set: `stride` is its num_local_blocks * block, `width`
  its num_global_blocks * block, `num_summaries` its
  num_different_global_patterns. In long-range-arena, the first position of
  each block is a summary, too.

  Args:
    name: one of `FACTORIZATIONS`, or an expression that `parse` reads.
    stride: stride of strided attention, or block size of fixed attention.
    window: number of keys of local attention.
    width: positions in a summary.
    num_summaries: number of distinct summaries, which the heads use in turn.
    head: index of the head.

  Raises:
    ValueError: the name is unknown, or a setting does not fit.

  >>> settings = dict(stride=8, window=8, width=2, num_summaries=2)
  >>> print(*factorize("fixed", head=3, **settings), sep=", ")
  Block(8), Summary(8, 2, shift=1)
  """
  if num_summaries < 1:
    raise ValueError(f"{num_summaries=} must be at least 1")
  if name in FACTORIZATIONS and name.startswith("fixed"):
    block, summary = Block(stride), Summary(stride, width, head % num_summaries)
  match name:
    case "dense":
      return (Causal(),)
    case "local":
      return (Local(window),)
    case "strided":
      return Local(window), Strided(stride)
    case "fixed":
      return block, summary
    case "fixed_openai" | "fixed_deepspeed":
      return (block | summary,)
    case "fixed_lra":
      return (block | summary | Summary(stride, 1, stride - 1),)
  return tuple(heads[head % len(heads)] for heads in parse(name))


def assign(
  name: str,
  mode: str,
  *,
  num_layers: int,
  num_heads: int,
  cycle: Sequence[int] = (),
  **settings: int,
) -> tuple[tuple[Pattern, ...], ...]:
  """Assigns the factors of a factorization to a network's layers and heads.

  Source: Child et al. 2019, section 4.2, which defines the three modes.

  Args:
    name: as in `factorize`.
    mode: "interleaved": layer r uses factor cycle[r % len(cycle)]. "merged":
      every head uses the union of all factors. "heads": head h uses factor
      h % num_factors.
    num_layers, num_heads: size of the network.
    cycle: order of the factors in mode "interleaved"; by default each in turn.
    **settings: as in `factorize`.

  Returns:
    A tuple (layers) of tuples (heads) of patterns.

  Raises:
    ValueError: the mode, the name, a factor of `cycle` or a setting is invalid.
  """
  if mode not in MODES:
    raise ValueError(
      f"unknown attention.mode {mode!r}; known: {', '.join(MODES)}"
    )
  num_factors = len(factorize(name, **settings))
  cycle = tuple(cycle) or tuple(range(num_factors))
  if num_factors == 1:
    cycle = (0,)  # so that a cycle set for another pattern does no harm
  if not all(m in range(num_factors) for m in cycle):
    raise ValueError(
      f"attention.cycle {cycle} must list factors 0 to {num_factors - 1}"
      f" of {name!r}"
    )

  def pattern(layer: int, head: int) -> Pattern:
    if mode == "heads":
      # Heads of one factor are numbered from 0, so that they use every summary.
      factors = factorize(name, head=head // num_factors, **settings)
      return factors[head % num_factors]
    factors = factorize(name, head=head, **settings)
    if mode == "merged":
      return functools.reduce(Pattern.__or__, factors)
    return factors[cycle[layer % len(cycle)]]

  return tuple(
    tuple(pattern(layer, head) for head in range(num_heads))
    for layer in range(num_layers)
  )


def parse(text: str) -> tuple[tuple[Pattern, ...], ...]:
  """The factors of an expression over the registered patterns.

  Args:
    text: factors separated by commas. A factor is a pattern in the algebra
      | & -, or a tuple of patterns that the heads use in turn.

  Returns:
    A tuple (factors) of tuples (heads) of patterns.

  Raises:
    ValueError: the text is not such an expression, or a pattern rejects its
      arguments.

  >>> for heads in parse("(Local(4), Local(8)), BigBird(32) | Strided(8)"):
  ...   print(*heads, sep=" and ")
  Local(4) and Local(8)
  BigBird(block=32) | Strided(8)
  """
  try:
    tree = ast.parse(text.strip(), mode="eval").body
  except SyntaxError:
    raise _unknown(text) from None
  factors = tree.elts if isinstance(tree, ast.Tuple) else [tree]
  heads = [f.elts if isinstance(f, ast.Tuple) else [f] for f in factors]
  if not factors or not all(heads):
    raise _unknown(text)
  return tuple(tuple(_evaluate(node, text) for node in h) for h in heads)


_OPERATORS = {
  ast.BitOr: operator.or_,
  ast.BitAnd: operator.and_,
  ast.Sub: operator.sub,
}


def _evaluate(node: ast.expr, text: str) -> Pattern:
  match node:
    case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
      sides = _evaluate(left, text), _evaluate(right, text)
      return _OPERATORS[type(op)](*sides)
    case ast.Call(ast.Name(name), args, keywords) if name in CATALOGUE:
      values = [_constant(arg) for arg in args]
      named: dict[Any, Any] = {k.arg: _constant(k.value) for k in keywords}
      try:
        return CATALOGUE[name](*values, **named)
      except TypeError as error:
        message = str(error).replace("__init__()", "")
        raise ValueError(f"attention.pattern {text!r}: {message}") from None
  raise _unknown(ast.unparse(node))


def _constant(node: ast.expr) -> Any:
  try:
    return ast.literal_eval(node)
  except ValueError:
    raise _unknown(ast.unparse(node)) from None


def _unknown(name: str) -> ValueError:
  return ValueError(
    f"unknown attention.pattern {name!r}; known: {', '.join(FACTORIZATIONS)},"
    f" and expressions with | & - and commas over {', '.join(CATALOGUE)}"
  )
