"""Named factorizations, expressions, and how factors are assigned to layers."""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import operator
import re
import warnings
from collections.abc import Sequence
from typing import Any

from sparse_transformer.patterns import catalogue
from sparse_transformer.patterns.base import (
  CATALOGUE,
  CONTENT,
  Difference,
  Intersection,
  Pattern,
  Union,
  signature,
)
from sparse_transformer.patterns.checks import shorten

FACTORIZATIONS = (
  "dense",
  "local",
  "strided",
  "fixed",
  "strided_target",
  "fixed_openai",
  "fixed_deepspeed",
  "fixed_lra",
)
# The layers of published models, in turn: the expression of their factors.
PUBLISHED = {
  "gpt3": "Causal(), Local({window})",
  "gpt_oss": "Local(128), Causal()",
  "gemma2": "Local(4096), Causal()",
  "gemma3": 5 * "Local(1024), " + "Causal()",
  "olmo3": 3 * "Local(4096), " + "Causal()",
  "cohere2": 3 * "Local(4096), " + "Causal()",
  "mimo_v2_flash": 5 * "Local(128), " + "Causal()",
  "llama4": 3 * "Block(8192), " + "Causal()",
  "nanochat": 3 * "Local({half}), " + "Causal()",
}
DENSE_LAYERS = {"mimo_v2_flash": 0, "nanochat": -1}  # beside those in turn
MODES = ("interleaved", "merged", "heads")

# Nobody writes longer expressions by hand, and functions that recurse into
# deeply nested ones would exceed Python's recursion limit.
MAX_CHARACTERS = 4000
# Each pattern of a combination may need a separate loop in the compiled
# network, and its tiles are compared with those of all patterns before it.
MAX_COMBINED = 16


def factorize(
  name: str,
  *,
  stride: int = 0,
  window: int = 0,
  width: int = 0,
  num_summaries: int = 1,
  head: int = 0,
  length: int = 0,
) -> tuple[Pattern, ...]:
  """The factors of a named factorization, or of an expression, for one head.

  `dense`, `local`, `strided`, `fixed`: Child et al. 2019, section 4.3. The
  order of factors matters for what two layers reach: fixed attention has its
  block first and its summary second. `strided_target`: strided attention to the
  column of the target in place of the query's, see `Strided`.

  `fixed_openai`, `fixed_deepspeed`, `fixed_lra`: what other codebases call
  fixed, with both factors in one head. In openai/sparse_attention, each head
  has its own summary, counted from the end of the block. DeepSpeed's causal
  pattern is the same set: `stride` is its num_local_blocks * block, `width`
  its num_global_blocks * block, `num_summaries` its
  num_different_global_patterns. In long-range-arena, the first position of
  each block is also a summary.

  `PUBLISHED` are the factors of a model's layers, in turn, with its windows;
  they are not these models, which also have sinks, soft caps or layers without
  positions. `gpt3`: Brown et al. 2020, arXiv 2005.14165, section 2.1, whose
  band is not published: `window`. `gpt_oss`: gpt_oss/torch/model.py in
  openai/gpt-oss. `gemma2`, `gemma3`, `llama4`: MaxText. `olmo3`, `cohere2`:
  their configs on Hugging Face; the smallest gemma3 has 512. `mimo_v2_flash`:
  arXiv 2601.02780, section 2; `assign` makes its first layer dense. `nanochat`:
  dev/LOG.md in karpathy/nanochat, 11 January 2026, with half the sequence to
  the left of a query, later a quarter; `assign` makes its last layer dense.

  Args:
    name: one of `FACTORIZATIONS` or `PUBLISHED`, or an expression that `parse`
      reads. Those that do not use a setting do not require it.
    stride: stride of strided attention, or block size of fixed attention.
    window: number of keys of local attention.
    width: positions in a summary.
    num_summaries: number of distinct summaries; head h has number
      h % num_summaries.
    head: index of the head.
    length: positions in a sequence, which `nanochat` requires. The other
      layouts don't depend on it: a window beyond it is dense.

  Raises:
    ValueError: the name is unknown, or a setting does not fit.

  >>> settings = dict(stride=8, window=8, width=2, num_summaries=2)
  >>> print(*factorize("fixed", head=3, **settings), sep=", ")
  Block(8), Summary(8, 2, shift=1)
  """
  if num_summaries < 1:
    raise ValueError(f"{num_summaries=} must be at least 1")
  if name in FACTORIZATIONS and name.startswith("fixed"):
    block = catalogue.Block(stride)
    summary = catalogue.Summary(stride, width, head % num_summaries)
  match name:
    case "dense":
      return (catalogue.Causal(),)
    case "local":
      return (catalogue.Local(window),)
    case "strided":
      return catalogue.Local(window), catalogue.Strided(stride)
    case "strided_target":
      return catalogue.Local(window), catalogue.Strided(stride, offset=1)
    case "fixed":
      return block, summary
    case "fixed_openai" | "fixed_deepspeed":
      return (block | summary,)
    case "fixed_lra":
      return (block | summary | catalogue.Summary(stride, 1, stride - 1),)
  if name == "nanochat" and length < 2:
    raise ValueError(f"pattern 'nanochat' requires {length=} to be at least 2")
  text = PUBLISHED.get(name, name)
  if name in PUBLISHED:
    text = text.format(window=window, half=length // 2 + 1)
  return tuple(heads[head % len(heads)] for heads in parse(text))


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
    cycle: order of the factors in mode "interleaved"; () stands for 0, 1, ...
    **settings: as in `factorize`.

  Returns:
    A tuple (layers) of tuples (heads) of patterns.

  Raises:
    ValueError: the mode, the name, a factor of `cycle` or a setting is invalid,
      or a head combines more than `MAX_COMBINED` patterns.
  """
  if mode not in MODES:
    raise ValueError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
  num_factors = len(factorize(name, **settings))
  cycle = tuple(cycle) or tuple(range(num_factors))
  if num_factors == 1:
    cycle = (0,)  # so that a cycle set for another pattern does no harm
  if not all(m in range(num_factors) for m in cycle):
    raise ValueError(
      f"cycle {shorten(cycle)} must list factors 0 to"
      f" {num_factors - 1} of {shorten(name)!r}"
    )

  # In mode "heads", the heads of one factor are numbered from 0, so that they
  # use every summary.
  num_numbers = -(-num_heads // num_factors) if mode == "heads" else num_heads
  heads = [factorize(name, head=h, **settings) for h in range(num_numbers)]
  if mode == "merged":
    rows = [tuple(functools.reduce(Pattern.__or__, head) for head in heads)]
  elif mode == "heads":
    places = [divmod(h, num_factors) for h in range(num_heads)]
    rows = [tuple(heads[number][factor] for number, factor in places)]
  else:
    factors = [tuple(head[m] for head in heads) for m in range(num_factors)]
    rows = [factors[m] for m in cycle]
  for pattern in itertools.chain(*rows):
    _check_count(_count_patterns(pattern), pattern)
  layers = [rows[layer % len(rows)] for layer in range(num_layers)]
  if name in DENSE_LAYERS and mode == "interleaved" and layers:
    layers[DENSE_LAYERS[name]] = factors[-1]
  return tuple(layers)


def bidirectional(pattern: Pattern) -> Pattern:
  """The form of a pattern in which queries see later keys also, if it has one.

  >>> print(bidirectional(catalogue.Local(5) | catalogue.Strided(9)))
  Local(5, causal=False) | Strided(9, causal=False)
  """
  if isinstance(pattern, catalogue.Causal):
    return catalogue.Full()
  fields = {
    x.name: getattr(pattern, x.name) for x in dataclasses.fields(pattern)
  }
  changes: dict[str, Any] = {
    name: bidirectional(value)
    for name, value in fields.items()
    if isinstance(value, Pattern)
  }
  changes |= {"causal": False} if "causal" in fields else {}
  found = dataclasses.replace(pattern, **changes)
  if isinstance(found, Union) and catalogue.Full() in (found.left, found.right):
    return catalogue.Full()
  return found


def _check_count(count: int, pattern: Pattern | str) -> None:
  if count > MAX_COMBINED:
    raise ValueError(
      f"pattern {shorten(pattern)} combines {count} patterns, but a"
      f" head may combine at most {MAX_COMBINED}"
    )


def _count_patterns(pattern: Pattern) -> int:
  inner = [x for x in vars(pattern).values() if isinstance(x, Pattern)]
  is_operator = isinstance(pattern, (Union, Intersection, Difference))
  return sum(map(_count_patterns, inner)) + (not is_operator)


def parse(text: str) -> tuple[tuple[Pattern, ...], ...]:
  """The factors of an expression over the registered patterns.

  Args:
    text: factors separated by commas, at most `MAX_CHARACTERS` in all. A factor
      is a pattern in the algebra | & -, or a tuple of patterns, which the
      heads cycle through.

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
  if len(text) > MAX_CHARACTERS:
    raise ValueError(
      f"pattern {shorten(text)!r} has {len(text)} characters, but an"
      f" expression may have at most {MAX_CHARACTERS}"
    )
  text = text.strip()
  if "#" in text:  # what follows would be a comment
    raise _unknown(text)
  try:
    with warnings.catch_warnings(action="ignore"):
      tree = ast.parse(text, mode="eval").body
  except SyntaxError as error:
    raise _unknown(text, f": {error.msg}") from None
  except (ValueError, RecursionError, MemoryError):
    raise _unknown(text) from None
  factors = tree.elts if isinstance(tree, ast.Tuple) else [tree]
  heads = [f.elts if isinstance(f, ast.Tuple) else [f] for f in factors]
  if not factors or not all(heads):
    raise _unknown(text)
  for node in itertools.chain(*heads):  # before anything recurses into one
    count = sum(isinstance(child, ast.Call) for child in ast.walk(node))
    _check_count(count, _source(node, text))
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
    case ast.Call(ast.Name(name)) if name in CATALOGUE | CONTENT:
      return _call((CATALOGUE | CONTENT)[name], node, text)
    case ast.BinOp():
      raise _unknown(_source(node, text), ", whose operator is none of | & -")
    case ast.Name(name) if name in CATALOGUE | CONTENT:
      expected = signature((CATALOGUE | CONTENT)[name])
      raise ValueError(f"pattern {name!r} lacks its arguments: {expected}")
    case ast.Name(name) if name in (*FACTORIZATIONS, *PUBLISHED):
      raise _unknown(name, " in an expression")
    case ast.UnaryOp(ast.Invert(), operand):
      source = _source(operand, text)
      raise _unknown(f"~{source}", f", write Full() - {shorten(source)}")
  raise _unknown(_source(node, text))


def _call(cls: type[Pattern], node: ast.Call, text: str) -> Pattern:
  named: dict[Any, Any] = {}
  try:
    values = [_argument(arg, text) for arg in node.args]
    for keyword in node.keywords:
      if keyword.arg in named:
        raise TypeError(f"repeated argument {keyword.arg!r}")
      named[keyword.arg] = _argument(keyword.value, text)
    inspect.signature(cls).bind(*values, **named)
    return cls(*values, **named)
  except TypeError as error:
    raise ValueError(
      f"pattern {shorten(_source(node, text))!r}: {error}; expected"
      f" {signature(cls)}"
    ) from None


def _argument(node: ast.expr, text: str) -> Any:
  if any(isinstance(child, ast.Call) for child in ast.walk(node)):
    return _evaluate(node, text)
  try:
    return ast.literal_eval(node)
  except (ValueError, TypeError, RecursionError):
    source = shorten(_source(node, text))
    raise TypeError(
      f"{source!r} is not a number, True, False or a pattern like Local(128)"
    ) from None


def _source(node: ast.expr, text: str) -> str:
  return ast.get_source_segment(text, node) or text


def _unknown(name: str, reason: str = "") -> ValueError:
  word = re.split(r"\W", name, maxsplit=1)[0][:100]
  known = {*FACTORIZATIONS, *PUBLISHED, *CATALOGUE, *CONTENT} - {word}
  close = ", ".join(difflib.get_close_matches(word, sorted(known)))
  return ValueError(
    f"unknown pattern {shorten(name)!r}{reason};"
    f"{close and f' did you mean {close}?'} docs/patterns.md lists all names;"
    " expressions combine them with | & - ; others must be registered first,"
    " for commands by a config file, --config=FILE"
  )
