"""Counts the launches and collectives of a compiled program.

An instruction in the body of a loop is counted once per iteration. Of the
branches of a conditional, only the one with the most launches is counted.
"""

import math
import re
from collections import Counter
from typing import NamedTuple

COLLECTIVES = set(
  "all-gather all-reduce all-to-all collective-broadcast collective-permute"
  " ragged-all-to-all reduce-scatter".split()
)
# Opcodes that launch nothing.
FREE = set(
  "add-dependency after-all bitcast constant domain get-tuple-element"
  " opt-barrier parameter partition-id replica-id tuple".split()
)
# Custom calls are kernels, except for these, which launch nothing.
FREE_CALL = re.compile('custom_call_target="(AllocateBuffer|Sharding)"')
# A conditional on an index has the first attribute. A conditional on a boolean
# has the other two.
BRANCHES = "branch_computations", "true_computation", "false_computation"
# {opcode: the attribute that names the called computation}.
CALLS = {"call": "to_apply", "async-start": "calls"}

# The text of a module is a list of computations:
#   %add (x: f32[], y: f32[]) -> f32[] {
#     ROOT %sum = f32[] add(%x, %y)
#   }
# The main computation begins with ENTRY.
COMPUTATION = re.compile(
  r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\n([\s\S]*?)\n\}", re.MULTILINE
)
INSTRUCTION = re.compile(
  r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)", re.MULTILINE
)
# An array such as bf16[8,128]: a dtype and sizes, which are empty for a scalar.
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
# The opcodes in the condition of a loop that counts its iterations.
COUNTING = {"constant", "compare"}
# {(kind, name): number}.
Counts = Counter[tuple[str, str]]
COPY = "copy", ""
UNKNOWN = "unknown loop", ""


class Instruction(NamedTuple):
  """One line of a computation: `name = shape opcode(rest`.

  Attributes:
    name: the name, which is unique in the module, such as "fusion.12".
    shape: the shape of the result, with its layout. A tuple is in brackets.
    opcode: the operation, such as "fusion".
    rest: the operands and attributes.
  """

  name: str
  shape: str
  opcode: str
  rest: str

  def computations(self, attribute: str) -> list[str]:
    """Returns the names in an attribute such as calls=%f or calls={%f, %g}."""
    value = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.rest)
    return re.findall(r"[\w.\-]+", value[1]) if value else []

  def operands(self) -> list[str]:
    """Returns operand names; "state#1" is the second array of a tuple."""
    # The operands end at the bracket that closes their list.
    depth = 1
    end = 0
    while end < len(self.rest) and depth:
      depth += {"(": 1, ")": -1}.get(self.rest[end], 0)
      end += 1
    return re.findall(r"%([\w.\-#]+)", self.rest[:end])


# {name: computation}.
Module = dict[str, list[Instruction]]


class Profile(NamedTuple):
  """The cost of one execution of a program.

  Attributes:
    launches: the number of launches by the name of the instruction up to its
      first dot.
    copies: the number of copies from memory to memory, which need no kernel.
    collectives: {opcode: (number, bytes of their results)}.
    unknown_loops: the number of loops whose number of iterations is unknown.
      Each of these loops is counted as one iteration.
  """

  launches: Counter[str]
  copies: int
  collectives: dict[str, tuple[int, int]]
  unknown_loops: int


def profile(text: str) -> Profile:
  """Returns the cost of one execution of a compiled program.

  Args:
    text: an optimized HLO module, from `compiled.as_text()`.

  Raises:
    ValueError: the text is not that of a module.
  """
  counts = _cost(*read_module(text))
  # One counter contains all kinds, because loops multiply them in the same way.
  launches: Counter[str] = Counter()
  collectives = {}
  for (kind, name), number in counts.items():
    if kind == "launch":
      launches[name] = number
    elif kind == "collective":
      collectives[name] = number, counts["bytes", name]
  return Profile(
    launches=launches,
    copies=counts[COPY],
    collectives=collectives,
    unknown_loops=counts[UNKNOWN],
  )


def read_module(text: str) -> tuple[Module, str]:
  """Returns the computations of a module, and the name of the main one.

  Args:
    text: an optimized HLO module, see `profile`.

  Raises:
    ValueError: the text is not that of a module.
  """
  module: Module = {}
  entry = ""
  for is_entry, name, lines in COMPUTATION.findall(text):
    module[name] = list(map(Instruction._make, INSTRUCTION.findall(lines)))
    if is_entry:
      entry = name
  if not entry:
    raise ValueError("the text of the program has no entry computation")
  return module, entry


def _cost(module, name):
  """Counts {(kind, name): number} in a computation and those that it calls."""
  total: Counts = Counter()
  for x in module[name]:
    if x.opcode == "while":
      # Ignore conditions, which usually only compare a counter.
      (body,) = x.computations("body")
      found = trips(module, x)
      total[UNKNOWN] += found is None
      times = 1 if found is None else found
      for key, number in _cost(module, body).items():
        # Count an unknown loop once, not once per iteration of its outer loop.
        total[key] += number if key == UNKNOWN else number * times
    elif x.opcode == "conditional":
      names = [y for attribute in BRANCHES for y in x.computations(attribute)]
      # Which branch runs depends on the data, so assume the most expensive one.
      total += max((_cost(module, y) for y in names), key=_num_launches)
    elif x.opcode in CALLS:
      for called in x.computations(CALLS[x.opcode]):
        total += _cost(module, called)
    else:
      total += _cost_of_one(module, x)
  return total


def _num_launches(counts):
  """Returns the total number of launches in a Counter."""
  return sum(n for (kind, _), n in counts.items() if kind == "launch")


def _cost_of_one(module, x):
  """Returns the cost of an instruction other than a loop, branch or call."""
  # An asynchronous loop fusion copies a slice.
  copies_slice = x.opcode == "fusion-start" and "kind=kLoop" in x.rest
  if copies_slice or x.opcode.endswith(("copy", "copy-start", "slice-start")):
    return Counter([COPY])

  total: Counts = Counter()
  is_free = x.opcode in FREE or x.opcode.endswith("-done")
  if not is_free and not FREE_CALL.search(x.rest):
    # Remove suffixes such as numbers and ".remat" from the name.
    total["launch", x.name.partition(".")[0]] = 1

  # A fusion may contain a collective.
  parts = [x]
  if x.opcode in ("fusion", "fusion-start"):
    (called,) = x.computations("calls")
    parts = module[called]
  for part in parts:
    # For an asynchronous collective, only its end has the shape of the result.
    kind = part.opcode.removesuffix("-done")
    if kind in COLLECTIVES:
      total["collective", kind] += 1
      total["bytes", kind] += num_bytes(part.shape)
  return total


def trips(module: Module, loop: Instruction) -> int | None:
  """Returns the number of iterations of a loop, or None if it is unknown.

  XLA records the number if it knows it. Otherwise, it is the only constant in a
  condition `counter < constant`. This assumes that the counter starts at 0 and
  increases by 1, as in `scan` and `fori_loop`.
  """
  known = re.search(r'known_trip_count[":{]+n":"(\d+)"', loop.rest)
  if known:
    return int(known[1])

  (condition,) = loop.computations("condition")
  # A condition that contains any other opcode does not count iterations.
  limits = []
  opcodes = set()
  is_below = False
  for x in module[condition]:
    opcodes.add(x.opcode)
    is_below |= "direction=LT" in x.rest

    value = re.match(r"\d+", x.rest)
    if x.opcode == "constant" and value:
      limits.append(int(value[0]))

  is_count = opcodes - {"get-tuple-element", "parameter"} == COUNTING
  return limits[0] if is_count and is_below and len(limits) == 1 else None


def num_bytes(shape: str) -> int:
  """Returns the bytes of a shape, without padding.

  >>> num_bytes("(bf16[8,8]{1,0}, s32[])")
  132
  """
  bits = 0
  # Layouts contain no square brackets, so they are never taken for arrays.
  for dtype, sizes in ARRAY.findall(shape):
    if dtype in ("token", "opaque"):
      continue
    size = math.prod(int(size) for size in sizes.split(",") if size)
    # The first number in a dtype is its width in bits, even in f8e4m3fn. The
    # dtype pred contains no number, and takes 8 bits.
    width = re.search(r"\d+", dtype)
    bits += size * (int(width[0]) if width else 8)
  return bits // 8
