"""Named factorizations, expressions, and how to assign factors to layers."""

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

from sparse_transformer.patterns.base import (
  CATALOGUE,
  CONTENT,
  Combination,
  Pattern,
  signature,
)
from sparse_transformer.patterns.catalogue import Causal, Full
from sparse_transformer.patterns.checks import shorten

_FIXED = "Block({stride}) | Summary({stride}, {width}, {shift})"
# The expressions of named factors. The order of factors affects what two layers
# can reach: in fixed attention, the block comes first and the summary second.
FACTORIZATIONS = {
  "dense": "Causal()",
  "local": "Local({window})",
  "strided": "Local({window}), Strided({stride})",
  "fixed": "Block({stride}), Summary({stride}, {width}, {shift})",
  "strided_target": "Local({window}), Strided({stride}, offset=1)",
  "fixed_openai": _FIXED,
  "fixed_deepspeed": _FIXED,
  "fixed_lra": _FIXED + " | Summary({stride}, 1, {last})",
}
# The layers of published models, which repeat, with the models' windows. Their
# sinks, soft caps and layers without positional encoding are not included.
# Where no source is given, it is MaxText.
PUBLISHED = {
  "gpt3": "Causal(), Local({window})",  # arXiv 2005.14165, section 2.1
  "gpt_oss": "Local(128), Causal()",  # gpt_oss/torch/model.py, openai/gpt-oss
  "gemma2": "Local(4096), Causal()",
  "gemma3": 5 * "Local(1024), " + "Causal()",  # the smallest model uses 512
  "olmo3": 3 * "Local(4096), " + "Causal()",  # its config on Hugging Face
  "cohere2": 3 * "Local(4096), " + "Causal()",  # the same
  "llama4": 3 * "Block(8192), " + "Causal()",
}
MODES = ("interleaved", "merged", "heads")

MAX_CHARACTERS = 4000  # longer text could exceed Python's recursion limit
# The number of patterns is limited because each one may need a separate loop in
# the compiled network, and because its tiles are compared with the tiles of all
# patterns before it.
MAX_COMBINED = 16


def factorize(
  name: str,
  *,
  stride: int = 0,
  window: int = 0,
  width: int = 0,
  num_summaries: int = 1,
  head: int = 0,
) -> tuple[Pattern, ...]:
  """Returns the factors that a name or an expression stands for, in one head.

  `dense`, `local`, `strided`, `fixed`: Child et al. 2019, section 4.3.
  `strided_target`: strided attention with the column of the target, see
  `Strided`. `fixed_openai`, `fixed_deepspeed`, `fixed_lra`: patterns that other
  codebases call fixed attention, with both factors in one head. In
  openai/sparse_attention, each head has its own summary, counted from the end
  of the block. DeepSpeed's causal pattern is the same set, where `stride`
  corresponds to its num_local_blocks * block, `width` to its num_global_blocks
  * block, and `num_summaries` to its num_different_global_patterns. In
  long-range-arena, the first position of each block also belongs to the
  summary.

  Args:
    name: a name in `FACTORIZATIONS` or `PUBLISHED`, or an expression that
      `parse` reads. Settings that the name or the expression does not use are
      ignored.
    stride: stride of strided attention, or block size of fixed attention.
    window: number of keys in local attention.
    width: number of positions in a summary.
    num_summaries: number of distinct summaries; head h uses the summary with
      index h % num_summaries.
    head: index of the head.

  Raises:
    ValueError: a setting that the name uses is out of range, or the text is not
      an expression.

  >>> settings = dict(stride=8, window=8, width=2, num_summaries=2)
  >>> print(*factorize("fixed", head=3, **settings), sep=", ")
  Block(8), Summary(8, 2, shift=1)
  """
  # Text that is not a known name is read as an expression, which has no
  # settings.
  text = (FACTORIZATIONS | PUBLISHED).get(name)
  if text is None:
    text = name
  elif num_summaries < 1:
    raise ValueError(f"{num_summaries=} must be at least 1")
  else:
    text = text.format(
      stride=stride,
      window=window,
      width=width,
      shift=head % num_summaries,
      last=stride - 1,
    )

  # If a factor lists several patterns, heads alternate between them.
  return tuple(heads[head % len(heads)] for heads in parse(text))


def assign(
  name: str,
  mode: str,
  *,
  num_layers: int,
  num_heads: int,
  cycle: Sequence[int] = (),
  stride: int = 0,
  window: int = 0,
  width: int = 0,
  num_summaries: int = 1,
) -> tuple[tuple[Pattern, ...], ...]:
  """Assigns factors to layers and heads: Child et al. 2019, section 4.2.

  Args:
    name: as in `factorize`.
    mode: "interleaved": layer r uses factor cycle[r % len(cycle)]. "merged":
      every head uses the union of all factors. "heads": head h uses factor
      h % num_factors.
    num_layers, num_heads: size of the network.
    cycle: order of the factors in mode "interleaved"; () stands for the order
      0, 1, ...
    stride, window, width, num_summaries: as in `factorize`.

  Returns:
    A tuple (layers) of tuples (heads) of patterns.

  Raises:
    ValueError: the mode is unknown, the cycle lists a factor that does not
      exist, or `factorize` raises an error.

  >>> layers = assign(
  ...   "strided", "heads", num_layers=3, num_heads=2, stride=8, window=4
  ... )
  >>> print(*layers[2], sep=", ")
  Local(4), Strided(8)
  """
  if mode not in MODES:
    raise ValueError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
  factors_of = functools.partial(
    factorize,
    name,
    stride=stride,
    window=window,
    width=width,
    num_summaries=num_summaries,
  )

  num_factors = len(factors_of())
  if num_factors == 1 or not cycle:
    # A single factor ignores a cycle that was set for another pattern.
    cycle = range(num_factors)
  if not all(factor in range(num_factors) for factor in cycle):
    raise ValueError(
      f"cycle {shorten(tuple(cycle))} must list factors 0 to"
      f" {num_factors - 1} of {shorten(name)!r}"
    )

  if mode == "heads":
    # The heads of each factor are counted from 0, so that they use all
    # summaries.
    heads = []
    for head in range(num_heads):
      number, factor = divmod(head, num_factors)
      heads.append(factors_of(head=number)[factor])
    return (tuple(heads),) * num_layers

  # Heads differ in their summaries, or in the pattern that they use if heads
  # alternate.
  factors = [factors_of(head=head) for head in range(num_heads)]
  if mode == "merged":
    _check_count(num_factors, name)
    merged = [functools.reduce(operator.or_, x) for x in factors]
    return (tuple(merged),) * num_layers

  # Rows are indexed by factor, then by head, because all heads of a layer use
  # the same factor.
  rows = list(zip(*factors, strict=True))
  return tuple(rows[cycle[layer % len(cycle)]] for layer in range(num_layers))


def bidirectional(pattern: Pattern) -> Pattern:
  """Returns the form of a pattern in which queries also see later keys.

  Patterns without such a form are returned unchanged, even within a
  combination.

  >>> print(bidirectional(parse("Local(4) | LogSparse()")[0][0]))
  Local(4, causal=False) | LogSparse()
  """
  match pattern:
    case Causal():
      return Full()
    case Combination(left, right):
      return type(pattern)(bidirectional(left), bidirectional(right))
  if hasattr(pattern, "causal"):
    return dataclasses.replace(pattern, causal=False)  # type: ignore[call-arg]
  return pattern


def _check_count(count, text):
  """Checks that a head does not combine too many patterns."""
  if count > MAX_COMBINED:
    raise ValueError(
      f"pattern {shorten(text)} combines {count} patterns, but a"
      f" head may combine at most {MAX_COMBINED}"
    )


def parse(text: str) -> tuple[tuple[Pattern, ...], ...]:
  """Reads an expression that combines registered patterns.

  Args:
    text: factors separated by commas, at most `MAX_CHARACTERS` characters in
      all. A factor is either a pattern or a tuple of patterns. A pattern may
      combine at most `MAX_COMBINED` patterns with | & -. Heads alternate
      between the patterns of a tuple.

  Returns:
    A tuple (factors) of tuples (heads) of patterns.

  Raises:
    ValueError: the text is not such an expression.

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
  factors = _split(text)
  # A single tuple without a trailing comma is ambiguous: its patterns could
  # alternate across heads or across layers.
  if len(factors) == 1 and len(factors[0]) > 1 and not text.endswith(","):
    raise ValueError(
      f"pattern {shorten(text)!r} is ambiguous: add a comma at its end if heads"
      " alternate between the patterns, or drop the parentheses if layers do"
    )

  # Patterns are counted before any recursive function evaluates them.
  for node in itertools.chain.from_iterable(factors):
    count = sum(isinstance(child, ast.Call) for child in ast.walk(node))
    _check_count(count, _source(node, text))

  return tuple(
    tuple(_evaluate(node, text) for node in heads) for heads in factors
  )


def _split(text):
  """Parses an expression into the syntax trees of each factor's heads."""
  if "#" in text:  # Python would ignore what follows as a comment
    raise _unknown(text)
  try:
    # With a trailing comma, even a single factor is a tuple. Python's warnings
    # about text such as `1is` are ignored, because such text is rejected below.
    with warnings.catch_warnings(action="ignore"):
      tree = ast.parse(text.removesuffix(",") + ",", mode="eval").body
  except SyntaxError as error:
    raise _unknown(text, f": {error.msg}") from None
  except (ValueError, RecursionError, MemoryError):
    # The text contains null characters, or brackets nested too deeply for
    # Python's parser.
    raise _unknown(text) from None

  factors = [_items(node) for node in _items(tree)]
  if not all(factors):
    raise _unknown(text)
  return factors


def _items(node):
  return node.elts if isinstance(node, ast.Tuple) else [node]


_OPERATORS = {
  ast.BitOr: operator.or_,
  ast.BitAnd: operator.and_,
  ast.Sub: operator.sub,
}


def _evaluate(node, text):
  """Returns the pattern of a syntax tree.

  No text is executed: names are looked up among the registered classes, and
  arguments must be literals.
  """
  classes = CATALOGUE | CONTENT
  source = _source(node, text)
  match node:
    case ast.BinOp(left, operation, right) if type(operation) in _OPERATORS:
      combine = _OPERATORS[type(operation)]
      return combine(_evaluate(left, text), _evaluate(right, text))
    case ast.BinOp():
      raise _unknown(source, ", whose operator is none of | & -")
    case ast.Call(ast.Name(name)) if name in classes:
      return _call(classes[name], node, text)
    case ast.Call(ast.Name("where" | "explicit" as name)):
      raise ValueError(
        f"pattern {name}(...) cannot be read from text: pass it to attend as"
        " an object; for a config, register a class, as docs/architecture.md"
        " shows"
      )
    case ast.Name(name) if name in classes:
      expected = signature(classes[name])
      raise ValueError(f"pattern {name!r} lacks its arguments: {expected}")
    case ast.Name(name) if name in FACTORIZATIONS | PUBLISHED:
      # The message shows an example with typical sizes.
      factors = factorize(name, stride=128, window=128, width=32)
      between = " or " if name in PUBLISHED else " | "
      expression = between.join(dict.fromkeys(map(str, factors)))
      raise ValueError(
        f"pattern {name!r} is a name that only attention.pattern of a config"
        f" accepts; for attend, or in an expression, write {expression}"
      )
  raise _unknown(source)


def _call(cls, node, text):
  """Makes a pattern of class `cls` from the syntax tree of a call.

  If the arguments do not fit, the error shows the signature of the class.
  """
  try:
    values = [_argument(x, text) for x in node.args]
    by_name: Any = {x.arg: _argument(x.value, text) for x in node.keywords}
    if len(by_name) < len(node.keywords):
      raise TypeError("a repeated argument")

    # Errors of `bind` are clearer than errors of the constructor.
    inspect.signature(cls).bind(*values, **by_name)
    return cls(*values, **by_name)
  except TypeError as error:
    raise ValueError(
      f"pattern {shorten(_source(node, text))!r}: {error}; expected"
      f" {signature(cls)}"
    ) from None


def _argument(node, text):
  """Returns the value of a literal. Raises TypeError for anything else."""
  try:
    return ast.literal_eval(node)
  except (ValueError, TypeError, RecursionError):
    source = shorten(_source(node, text))
    raise TypeError(f"{source!r} is not a number, True or False") from None


def _source(node, text):
  """Returns the source text of a syntax tree, for messages."""
  return ast.get_source_segment(text, node) or text


def _unknown(text, reason=""):
  """Returns the error for an unknown name or expression."""
  # A suggestion helps if the text begins with a misspelt name.
  word = re.split(r"\W", text, maxsplit=1)[0][:100]
  hint = ""
  if word not in CATALOGUE:
    known = set(FACTORIZATIONS).union(PUBLISHED, CATALOGUE, CONTENT) - {word}
    close = difflib.get_close_matches(word, sorted(known))
    hint = f" did you mean {', '.join(close)}?" if close else ""
  return ValueError(
    f"unknown pattern {shorten(text)!r}{reason};{hint}"
    " docs/patterns.md lists all names;"
    " expressions combine them with | & - ; to use your own pattern, register"
    " its class, for commands in the file that --config names"
  )
