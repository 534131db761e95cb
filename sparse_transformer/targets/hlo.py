"""Reads a compiled program: its launches and collectives.

One execution of the entry computation of an optimized HLO module launches each
of its instructions once, those of a loop's body as often as the loop runs. Of
the branches of a conditional, the one with the most launches is counted.
"""

import collections
import dataclasses
import math
import re
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
FREE_CALLS = {"AllocateBuffer", "Sharding"}  # targets of custom calls

BRANCHES = "branch_computations", "true_computation", "false_computation"
CALLS = {"call": "to_apply", "async-start": "calls"}

COMPUTATION = re.compile(
  r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\n([\s\S]*?)\n\}", re.MULTILINE
)
INSTRUCTION = re.compile(
  r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)", re.MULTILINE
)
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")

Counts = collections.Counter[str]


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


@dataclasses.dataclass
class Profile:
  """Cost of one execution."""

  # Kernels by the name of the instruction, up to its first dot.
  launches: Counts = dataclasses.field(default_factory=collections.Counter)
  copies: int = 0  # copies from memory to memory, which need no kernel
  # {kind: (how many, bytes of their results on one device)}.
  collectives: dict[str, tuple[int, int]] = dataclasses.field(
    default_factory=dict
  )
  # Loops whose number of trips is unknown; they count as one.
  unknown_loops: int = 0


def profile(text: str) -> Profile:
  """The cost of one execution of an optimized HLO module."""
  module: dict[str, dict[str, Instruction]] = {}
  entry = None
  for is_entry, name, lines in COMPUTATION.findall(text):
    found = (Instruction(*x) for x in INSTRUCTION.findall(lines))
    module[name] = {x.name: x for x in found}
    entry = name if is_entry else entry
  if entry is None:
    raise ValueError("the text of the program has no entry computation")
  result = Profile()
  for x, times in _executed(module, entry):
    if x.opcode == "while":
      result.unknown_loops += _trips(module, x) is None
    elif _is_copy(x):
      result.copies += times
    else:
      if not _is_free(x):
        # Names end in numbers, and in what the compiler did: ".remat".
        name = x.name.partition(".")[0]
        result.launches[name] += times
      for part in _fused(module, x).values() or [x]:
        # The end of a collective has the shape of its result.
        kind = part.opcode.removesuffix("-done")
        if kind in COLLECTIVES:
          count, size = result.collectives.get(kind, (0, 0))
          size += times * num_bytes(part.shape)
          result.collectives[kind] = count + times, size
  return result


def _executed(module, name, times=1):
  """(instruction, how often it is executed)."""
  for x in module[name].values():
    if x.opcode == "while":
      yield x, times
      (body,), trips = x.computations("body"), _trips(module, x)
      trips = 1 if trips is None else trips
      yield from _executed(module, body, times * trips)
    elif x.opcode == "conditional":
      branches = (
        [*_executed(module, branch, times)]
        for attribute in BRANCHES
        for branch in x.computations(attribute)
      )
      yield from max(branches, key=_count_launches)
    elif x.opcode in CALLS:
      for called in x.computations(CALLS[x.opcode]):
        yield from _executed(module, called, times)
    else:
      yield x, times


def _count_launches(executed):
  return sum(
    times
    for x, times in executed
    if not (x.opcode == "while" or _is_copy(x) or _is_free(x))
  )


def _fused(module, instruction):
  """The computation of a fusion; empty for anything else."""
  if instruction.opcode not in ("fusion", "fusion-start"):
    return {}
  (name,) = instruction.computations("calls")
  return module[name]


def _trips(module, loop):
  """Trips of a loop, as known to the compiler, or by its condition.

  One comparison with one constant is taken to count from 0 by 1 up to it.
  """
  if known := re.search(r'known_trip_count[":{]+n":"(\d+)"', loop.rest):
    return int(known[1])
  (condition,) = loop.computations("condition")
  found = module[condition].values()
  constants = (x.rest for x in found if x.opcode == "constant")
  limits = [int(x[0]) for x in map(re.compile(r"\d+").match, constants) if x]
  opcodes = {x.opcode for x in found} - {"get-tuple-element", "parameter"}
  is_below = any("direction=LT" in x.rest for x in found)
  if opcodes == {"constant", "compare"} and len(limits) == 1 and is_below:
    return limits[0]
  return None


def _is_free(instruction):
  if instruction.opcode == "custom-call":
    target = re.search(r'custom_call_target="([^"]*)"', instruction.rest)
    return target is not None and target[1] in FREE_CALLS
  return instruction.opcode in FREE or instruction.opcode.endswith("-done")


def _is_copy(instruction):
  """Checks for copies of memory. Asynchronous loop fusions copy a slice."""
  if instruction.opcode == "fusion-start":
    return "kind=kLoop" in instruction.rest
  return instruction.opcode.endswith(("copy", "copy-start", "slice-start"))


def num_bytes(shape: str) -> int:
  """Bytes of a shape, without padding: "(bf16[8,128]{1,0}, s32[])" has 2,052.

  >>> num_bytes("(bf16[8,128]{1,0:T(8,128)(2,1)}, s32[])")
  2052
  """
  bits = 0
  # Layouts contain no brackets, so that they never look like arrays.
  for dtype, sizes in ARRAY.findall(shape):
    if dtype not in ("token", "opaque"):
      width = re.search(r"\d+", dtype)  # pred has none
      size = math.prod(int(size) for size in sizes.split(",") if size)
      bits += size * int(width[0] if width else 8)
  return bits // 8
