"""Counts the launches and collectives of a compiled program.

An instruction in the body of a loop is counted once per iteration. Of the
branches of a conditional, only the one with the most launches is counted.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
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
# What an instruction costs, besides reading and writing memory.
LAUNCH, COPY = "launch", "copy"


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
    launches: {name of an instruction: number of its launches}, where names are
      cut at the first dot.
    copies: the number of copies from memory to memory, which need no kernel.
    collectives: {opcode: (number of collectives, total bytes of their
      results)}.
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
  module, entry = read_module(text)
  launches: Counter[str] = Counter()
  copies = 0
  collectives: dict[str, tuple[int, int]] = {}
  unknown_loops = 0
  for x, times, _, _ in execute(module, entry):
    if x.opcode == "while":
      unknown_loops += 1
      continue

    kind = kind_of(x)
    if kind == COPY:
      copies += times
      continue
    if kind == LAUNCH:
      # Remove suffixes such as numbers and ".remat" from the name.
      launches[x.name.partition(".")[0]] += times
    for opcode, size in _collectives(module, x):
      number, total = collectives.get(opcode, (0, 0))
      collectives[opcode] = number + times, total + times * size
  return Profile(
    launches=launches,
    copies=copies,
    collectives=collectives,
    unknown_loops=unknown_loops,
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


class Executed(NamedTuple):
  """An instruction that a program executes.

  Attributes:
    instruction: the instruction. The `while` instruction of a loop is yielded
      only if its number of iterations is unknown. It is then yielded once,
      before the body of the loop.
    times: how often it is executed.
    shapes: {name: shape} of all instructions in the computation that contains
      this instruction.
    is_in_loop: whether that computation is part of a loop.
  """

  instruction: Instruction
  times: int
  shapes: dict[str, str]
  is_in_loop: bool


def execute(
  module: Module, name: str, times: int = 1, is_in_loop: bool = False
) -> Iterator[Executed]:
  """Yields the instructions that a computation and its callees execute.

  Args:
    module: the module.
    name: the name of the computation.
    times: how often it is executed.
    is_in_loop: whether it is part of a loop.
  """
  shapes = {x.name: x.shape for x in module[name]}
  for x in module[name]:
    if x.opcode == "while":
      # Ignore conditions, which usually only compare a counter.
      (body,) = x.computations("body")
      number = trips(module, x)
      if number is None:
        yield Executed(
          instruction=x, times=1, shapes=shapes, is_in_loop=is_in_loop
        )
        number = 1
      yield from execute(module, body, times * number, is_in_loop=True)
    elif x.opcode == "conditional":
      # Which branch runs depends on the data, so assume the most expensive one.
      names = [y for attribute in BRANCHES for y in x.computations(attribute)]
      branches = [list(execute(module, y, times, is_in_loop)) for y in names]
      yield from max(branches, key=_num_launches)
    elif x.opcode in CALLS:
      for called in x.computations(CALLS[x.opcode]):
        yield from execute(module, called, times, is_in_loop)
    else:
      yield Executed(
        instruction=x, times=times, shapes=shapes, is_in_loop=is_in_loop
      )


def _num_launches(executed):
  """Returns the total number of launches of `Executed` instructions."""
  return sum(x.times for x in executed if kind_of(x.instruction) == LAUNCH)


def kind_of(x: Instruction) -> str:
  """Returns `LAUNCH`, `COPY`, or "" if an instruction costs nothing."""
  # An asynchronous loop fusion copies a slice.
  copies_slice = x.opcode == "fusion-start" and "kind=kLoop" in x.rest
  if copies_slice or x.opcode.endswith(("copy", "copy-start", "slice-start")):
    return COPY
  is_free = x.opcode in FREE or x.opcode.endswith("-done")
  return "" if is_free or FREE_CALL.search(x.rest) else LAUNCH


def _collectives(module, x):
  """Yields (opcode, result bytes) for each collective in an instruction."""
  # A fusion may contain a collective.
  parts = [x]
  if x.opcode in ("fusion", "fusion-start"):
    (called,) = x.computations("calls")
    parts = module[called]
  for part in parts:
    # For an asynchronous collective, only its end has the shape of the result.
    kind = part.opcode.removesuffix("-done")
    if kind in COLLECTIVES:
      yield kind, num_bytes(part.shape)


def trips(module: Module, loop: Instruction) -> int | None:
  """Returns the number of iterations of a loop, or None if it is unknown.

  If XLA knows the number, it is recorded in the instruction. Otherwise, the
  condition must be `counter < constant`, and the result is its only constant.
  This assumes that the counter starts at 0 and increases by 1, as in `scan` and
  `fori_loop`.
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
