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
Counts = Counter[tuple[str, str]]
COPY, UNKNOWN = ("copy", ""), ("unknown loop", "")  # beside (kind, name)


class Instruction(NamedTuple):
  """One line of a computation."""

  name: str
  shape: str
  opcode: str
  rest: str  # operands and attributes

  def computations(self, attribute: str) -> list[str]:
    """Names in an attribute: calls=%f, branch_computations={%f, %g}."""
    found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.rest)
    return re.findall(r"[\w.\-]+", found[1]) if found else []


class Profile(NamedTuple):
  """Cost of one execution."""

  launches: Counter[str]  # by the name of the instruction, up to its first dot
  copies: int  # from memory to memory, which need no kernel
  collectives: dict[str, tuple[int, int]]  # how many, bytes of their results
  unknown_loops: int  # whose number of trips is unknown; they count as one


def profile(text: str) -> Profile:
  """The cost of one execution of an optimized HLO module."""
  module, entry = {}, None
  for is_entry, name, lines in COMPUTATION.findall(text):
    module[name] = [Instruction(*x) for x in INSTRUCTION.findall(lines)]
    entry = name if is_entry else entry
  if entry is None:
    raise ValueError("the text of the program has no entry computation")
  total = _cost(module, entry)
  of = lambda kind: Counter({x: n for (k, x), n in total.items() if k == kind})
  sizes = of("bytes")
  collectives = {x: (n, sizes[x]) for x, n in of("collective").items()}
  return Profile(of("launch"), total[COPY], collectives, total[UNKNOWN])


def _cost(module, name):
  """{(kind, name): how many} of a computation."""
  total: Counts = Counter()
  for x in module[name]:
    if x.opcode == "while":
      (body,), trips = x.computations("body"), _trips(module, x)
      total[UNKNOWN] += trips is None
      for key, number in _cost(module, body).items():
        is_repeated = key != UNKNOWN and trips is not None
        total[key] += number * (trips if is_repeated else 1)
    elif x.opcode == "conditional":
      names = [y for attribute in BRANCHES for y in x.computations(attribute)]
      launches = lambda cost: sum(
        n for (k, _), n in cost.items() if k == "launch"
      )
      total += max((_cost(module, y) for y in names), key=launches)
    elif x.opcode in CALLS:
      for called in x.computations(CALLS[x.opcode]):
        total += _cost(module, called)
    else:
      total += _cost_of_one(module, x)
  return total


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
  is_fusion = x.opcode in ("fusion", "fusion-start")
  for part in module[x.computations("calls")[0]] if is_fusion else [x]:
    # The end of a collective has the shape of its result.
    if (kind := part.opcode.removesuffix("-done")) in COLLECTIVES:
      total["collective", kind] += 1
      total["bytes", kind] += num_bytes(part.shape)
  return total


def _trips(module, loop):
  """Trips of a loop: known, or the one constant that it counts up to."""
  if known := re.search(r'known_trip_count[":{]+n":"(\d+)"', loop.rest):
    return int(known[1])
  found = module[loop.computations("condition")[0]]
  constants = (x.rest for x in found if x.opcode == "constant")
  limits = [int(x[0]) for x in map(re.compile(r"\d+").match, constants) if x]
  opcodes = {x.opcode for x in found} - {"get-tuple-element", "parameter"}
  is_below = any("direction=LT" in x.rest for x in found)
  is_count = opcodes == {"constant", "compare"} and is_below
  return limits[0] if is_count and len(limits) == 1 else None


def num_bytes(shape: str) -> int:
  """Bytes of a shape, without padding: "(bf16[8,8]{1,0}, s32[])" has 132."""
  bits = 0
  # Layouts contain no brackets, so that they never look like arrays.
  for dtype, sizes in ARRAY.findall(shape):
    if dtype not in ("token", "opaque"):
      width = re.search(r"\d+", dtype)  # pred has none
      size = math.prod(int(size) for size in sizes.split(",") if size)
      bits += size * int(width[0] if width else 8)
  return bits // 8
