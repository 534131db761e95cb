"""Named factorizations, pattern expressions, and their placement in layers."""

import ast
import functools
import operator

from sparse_transformer.patterns.base import Pattern
from sparse_transformer.patterns.catalogue import (
  CATALOGUE,
  Block,
  Causal,
  Local,
  Strided,
  Summary,
)


def factorize(name, *, stride, window, width, num_summaries, head=0):
  """The factors of a named factorization, or of an expression, for a head.

  dense, local, strided, fixed: Child et al. 2019, section 4.3. Fixed
  attention goes through its block first and its summary second, so the order
  matters for what two layers reach.

  fixed_openai, fixed_deepspeed, fixed_lra: what other codebases call fixed,
  both factors in one head. In openai/sparse_attention each head has its own
  summary, counted from the end of the block. DeepSpeed's, causal, is the same
  set by whole blocks: `stride` is its num_local_blocks * block, `width` its
  num_global_blocks * block, `num_summaries` its num_different_global_patterns.
  In long-range-arena the first position of each block is a summary, too.

  Any other name is an expression (see `parse`).
  """
  if num_summaries < 1:
    raise ValueError(f"{num_summaries=} must be at least 1")
  if name not in FACTORIZATIONS:
    return tuple(heads[head % len(heads)] for heads in parse(name))
  if name.startswith("fixed"):
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


def parse(text):
  """The factors of an expression over the patterns of this module.

  Factors are separated by commas; a factor is a pattern in the algebra
  | & -, or a tuple of patterns that the heads use in turn. Returns a tuple of
  tuples.

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


def _evaluate(node, text):
  match node:
    case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
      sides = _evaluate(left, text), _evaluate(right, text)
      return _OPERATORS[type(op)](*sides)
    case ast.Call(ast.Name(name), args, keywords) if name in CATALOGUE:
      args = [_constant(arg) for arg in args]
      keywords = {k.arg: _constant(k.value) for k in keywords}
      try:
        return CATALOGUE[name](*args, **keywords)
      except TypeError as error:
        message = str(error).replace("__init__()", "")
        raise ValueError(f"attention.pattern {text!r}: {message}") from None
  raise _unknown(ast.unparse(node))


def _constant(node):
  try:
    return ast.literal_eval(node)
  except ValueError:
    raise _unknown(ast.unparse(node)) from None


def _unknown(name):
  return ValueError(
    f"unknown attention.pattern {name!r}; known: {', '.join(FACTORIZATIONS)},"
    f" and combinations by | & - and commas of {', '.join(CATALOGUE)}"
  )


def assign(name, mode, *, num_layers, num_heads, cycle=(), **settings):
  """Patterns of all layers: a tuple (layers) of tuples (heads).

  interleaved: layer r uses factor cycle[r % len(cycle)], by default 0, 1, ...
  merged: every head uses the union of all factors.
  heads: head h uses factor h % p. (Section 4.2 has the three.)
  `name` and `settings` are those of `factorize`.
  """
  if mode not in MODES:
    raise ValueError(
      f"unknown attention.mode {mode!r}; known: {', '.join(MODES)}"
    )
  num_factors = len(factorize(name, **settings))
  cycle = tuple(cycle) or tuple(range(num_factors))
  if num_factors == 1:
    cycle = (0,)  # nothing to take turns: another pattern's cycle does no harm
  if not all(m in range(num_factors) for m in cycle):
    raise ValueError(
      f"attention.cycle {cycle} must hold factors 0 to {num_factors - 1}"
      f" of {name!r}"
    )

  def pattern(layer, head):
    if mode == "heads":
      # Heads of the same factor count on, so that they see every summary.
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
