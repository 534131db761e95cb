"""Reads a compiled program: its launches and collectives.

An instruction in a loop's body is launched as often as the loop runs. Of the
branches of a conditional, the one with the most launches is counted.
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
# Instructions that launch nothing.
FREE = set(
  "add-dependency after-all bitcast constant domain get-tuple-element"
  " opt-barrier parameter partition-id replica-id tuple".split()
)
# Custom calls are kernels, except these, which launch nothing.
FREE_CALL = re.compile('custom_call_target="(AllocateBuffer|Sharding)"')
# A conditional on an index has the first attribute; one on a
# boolean, the others.
BRANCHES = "branch_computations", "true_computation", "false_computation"
# The attribute that names the computation of an opcode.
CALLS = {"call": "to_apply", "async-start": "calls"}

# The text of a module is a list of computations:
#   %add (x: f32[], y: f32[]) -> f32[] {
#     ROOT %sum = f32[] add(%x, %y)
#   }
# The main one begins with ENTRY.
COMPUTATION = re.compile(
  r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\n([\s\S]*?)\n\}", re.MULTILINE
)
INSTRUCTION = re.compile(
  r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)", re.MULTILINE
)
# bf16[8,128]: a dtype and sizes, which are empty for a scalar.
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
# The opcodes in the condition of a loop that counts.
COUNTING = {"constant", "compare"}
# What an instruction costs, besides its traffic.
LAUNCH, COPY = "launch", "copy"


class Instruction(NamedTuple):
  """One line of a computation: `name = shape opcode(rest`.

  Attributes:
    name: unique in the module, such as "fusion.12".
    shape: of its result, with layout; a tuple has brackets.
    opcode: what it does, such as "fusion".
    rest: operands and attributes.
  """

  name: str
  shape: str
  opcode: str
  rest: str

  def computations(self, attribute: str) -> list[str]:
    """Names in an attribute: calls=%f, branch_computations={%f, %g}."""
    value = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.rest)
    return re.findall(r"[\w.\-]+", value[1]) if value else []

  def operands(self) -> list[str]:
    """Names of what it reads; "state#1" is the second array of a tuple."""
    # They end at the bracket that closes those of the operands.
    depth = 1
    end = 0
    while end < len(self.rest) and depth:
      depth += {"(": 1, ")": -1}.get(self.rest[end], 0)
      end += 1
    return re.findall(r"%([\w.\-#]+)", self.rest[:end])


# The computations by name.
Module = dict[str, list[Instruction]]


class Profile(NamedTuple):
  """Cost of one execution.

  Attributes:
    launches: number, by the name of the instruction, up to its first dot.
    copies: from memory to memory, which need no kernel.
    collectives: {opcode: (how many, bytes of their results)}.
    unknown_loops: loops whose number of trips is unknown; each counts as one.
  """

  launches: Counter[str]
  copies: int
  collectives: dict[str, tuple[int, int]]
  unknown_loops: int


def profile(text: str) -> Profile:
  """The cost of one execution of a compiled program.

  Args:
    text: an optimized HLO module, as `compiled.as_text()` gives it.

  Raises:
    ValueError: it is not the text of a module.
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
      # Names end in numbers, and in what the compiler did: ".remat".
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
    text: as in `profile`.

  Raises:
    ValueError: it is not the text of a module.
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
    instruction: the instruction. A loop is listed only if its number of trips
      is unknown, once, before its body.
    times: how often it is executed.
    shapes: {name: shape} of the computation that contains it.
    is_in_loop: whether that computation is part of a loop.
  """

  instruction: Instruction
  times: int
  shapes: dict[str, str]
  is_in_loop: bool


def execute(
  module: Module, name: str, times: int = 1, is_in_loop: bool = False
) -> Iterator[Executed]:
  """Lists what a computation, and all computations that it calls, execute.

  Args:
    module: the module.
    name: the name of the computation.
    times: how often it is executed.
    is_in_loop: whether it is part of a loop.
  """
  shapes = {x.name: x.shape for x in module[name]}
  for x in module[name]:
    if x.opcode == "while":
      # Conditions are left out, because as a rule they only compare a counter.
      (body,) = x.computations("body")
      number = trips(module, x)
      if number is None:
        yield Executed(x, 1, shapes, is_in_loop)
        number = 1
      yield from execute(module, body, times * number, is_in_loop=True)
    elif x.opcode == "conditional":
      # Which branch runs depends on the data, so the costliest is assumed.
      names = [y for attribute in BRANCHES for y in x.computations(attribute)]
      branches = [list(execute(module, y, times, is_in_loop)) for y in names]
      yield from max(branches, key=_num_launches)
    elif x.opcode in CALLS:
      for called in x.computations(CALLS[x.opcode]):
        yield from execute(module, called, times, is_in_loop)
    else:
      yield Executed(x, times, shapes, is_in_loop)


def _num_launches(executed):
  return sum(x.times for x in executed if kind_of(x.instruction) == LAUNCH)


def kind_of(x: Instruction) -> str:
  """Returns `LAUNCH`, `COPY`, or "" if an instruction costs nothing."""
  # Asynchronous loop fusions copy a slice.
  copies_slice = x.opcode == "fusion-start" and "kind=kLoop" in x.rest
  if copies_slice or x.opcode.endswith(("copy", "copy-start", "slice-start")):
    return COPY
  is_free = x.opcode in FREE or x.opcode.endswith("-done")
  return "" if is_free or FREE_CALL.search(x.rest) else LAUNCH


def _collectives(module, x):
  """Yields (opcode, bytes of its result) of collectives in an instruction."""
  # A fusion may contain a collective.
  parts = [x]
  if x.opcode in ("fusion", "fusion-start"):
    (called,) = x.computations("calls")
    parts = module[called]
  for part in parts:
    # The end of a collective has the shape of its result.
    kind = part.opcode.removesuffix("-done")
    if kind in COLLECTIVES:
      yield kind, num_bytes(part.shape)


def trips(module: Module, loop: Instruction) -> int | None:
  """Returns the number of trips of a loop, or None if it is unknown.

  XLA notes it where it knows. Otherwise it is the one constant of a condition
  `counter < constant`, if the counter begins at 0 and grows by 1, as those of
  `scan` and `fori_loop` do.
  """
  known = re.search(r'known_trip_count[":{]+n":"(\d+)"', loop.rest)
  if known:
    return int(known[1])

  (condition,) = loop.computations("condition")
  # A condition with anything else in it does not count trips.
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
  """Bytes of a shape, without padding.

  >>> num_bytes("(bf16[8,8]{1,0}, s32[])")
  132
  """
  bits = 0
  # Layouts contain no brackets, so that they never look like arrays.
  for dtype, sizes in ARRAY.findall(shape):
    if dtype in ("token", "opaque"):
      continue
    size = math.prod(int(size) for size in sizes.split(",") if size)
    # The digits of a dtype are its bits, also in f8e4m3fn: the
    # first number counts.
    width = re.search(r"\d+", dtype)
    bits += size * (int(width[0]) if width else 8)  # pred has none
  return bits // 8
