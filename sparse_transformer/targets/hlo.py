"""Reads a compiled program: its launches and collectives.

An instruction in a loop's body is launched as often as the loop runs. Of the
branches of a conditional, the one with the most launches is counted.
"""

import math
import re
from collections import Counter
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
FREE_CALL = re.compile('custom_call_target="(AllocateBuffer|Sharding)"')
BRANCHES = "branch_computations", "true_computation", "false_computation"
CALLS = {"call": "to_apply", "async-start": "calls"}

COMPUTATION = re.compile(
  r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\n([\s\S]*?)\n\}", re.MULTILINE
)
INSTRUCTION = re.compile(
  r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)", re.MULTILINE
)
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
# The opcodes in the condition of a loop that counts.
COUNTING = {"constant", "compare"}
# How many there are, by (kind, name).
Counts = Counter[tuple[str, str]]
COPY = "copy", ""
UNKNOWN = "unknown loop", ""


class Instruction(NamedTuple):
  """One line of a computation."""

  name: str
  shape: str
  opcode: str
  rest: str  # operands and attributes

  def computations(self, attribute: str) -> list[str]:
    """Names in an attribute: calls=%f, branch_computations={%f, %g}."""
    value = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.rest)
    return re.findall(r"[\w.\-]+", value[1]) if value else []


# The computations by name.
Module = dict[str, list[Instruction]]


class Profile(NamedTuple):
  """Cost of one execution."""

  launches: Counter[str]  # by the name of the instruction, up to its first dot
  copies: int  # from memory to memory, which need no kernel
  collectives: dict[str, tuple[int, int]]  # how many, bytes of their results
  unknown_loops: int  # whose number of trips is unknown; they count as one


def profile(text: str) -> Profile:
  """The cost of one execution of an optimized HLO module."""
  module: Module = {}
  entry = ""
  for is_entry, name, lines in COMPUTATION.findall(text):
    module[name] = list(map(Instruction._make, INSTRUCTION.findall(lines)))
    if is_entry:
      entry = name
  if not entry:
    raise ValueError("the text of the program has no entry computation")

  counts = _cost(module, entry)
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


def _cost(module, name):
  """{(kind, name): how many} of a computation."""
  total: Counts = Counter()
  for x in module[name]:
    if x.opcode == "while":
      (body,) = x.computations("body")
      trips = _trips(module, x)
      total[UNKNOWN] += trips is None
      times = 1 if trips is None else trips
      for key, number in _cost(module, body).items():
        total[key] += number if key == UNKNOWN else number * times
    elif x.opcode == "conditional":
      names = [y for attribute in BRANCHES for y in x.computations(attribute)]
      total += max((_cost(module, y) for y in names), key=_num_launches)
    elif x.opcode in CALLS:
      for called in x.computations(CALLS[x.opcode]):
        total += _cost(module, called)
    else:
      total += _cost_of_one(module, x)
  return total


def _num_launches(counts):
  return sum(n for (kind, _), n in counts.items() if kind == "launch")


def _cost_of_one(module, x):
  # Asynchronous loop fusions copy a slice.
  copies_slice = x.opcode == "fusion-start" and "kind=kLoop" in x.rest
  if copies_slice or x.opcode.endswith(("copy", "copy-start", "slice-start")):
    return Counter([COPY])

  total: Counts = Counter()
  is_free = x.opcode in FREE or x.opcode.endswith("-done")
  if not is_free and not FREE_CALL.search(x.rest):
    # Names end in numbers, and in what the compiler did: ".remat".
    total["launch", x.name.partition(".")[0]] = 1

  parts = [x]
  if x.opcode in ("fusion", "fusion-start"):
    (called,) = x.computations("calls")
    parts = module[called]
  for part in parts:
    # The end of a collective has the shape of its result.
    kind = part.opcode.removesuffix("-done")
    if kind in COLLECTIVES:
      total["collective", kind] += 1
      total["bytes", kind] += num_bytes(part.shape)
  return total


def _trips(module, loop):
  """Trips of a loop: known, or the one constant that it counts up to."""
  known = re.search(r'known_trip_count[":{]+n":"(\d+)"', loop.rest)
  if known:
    return int(known[1])

  (condition,) = loop.computations("condition")
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
  """Bytes of a shape, without padding: "(bf16[8,8]{1,0}, s32[])" has 132."""
  bits = 0
  # Layouts contain no brackets, so that they never look like arrays.
  for dtype, sizes in ARRAY.findall(shape):
    if dtype in ("token", "opaque"):
      continue
    size = math.prod(int(size) for size in sizes.split(",") if size)
    width = re.search(r"\d+", dtype)
    bits += size * (int(width[0]) if width else 8)  # pred has none
  return bits // 8
