"""Reads a compiled program: what it launches, how often, and what it moves.

The text of an optimized HLO module lists its computations. One execution of the
entry launches each instruction of its own once, those of a loop's body as often
as the loop runs, and those of one branch of a conditional, of which the longest
is counted.
"""

import collections
import dataclasses
import json
import re
from collections.abc import Iterator

COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "all-to-all",
  "collective-broadcast",
  "collective-permute",
  "ragged-all-to-all",
  "reduce-scatter",
)
# Instructions that launch nothing.
FREE = {
  "add-dependency",
  "after-all",
  "bitcast",
  "constant",
  "domain",
  "get-tuple-element",
  "opt-barrier",
  "parameter",
  "partition-id",
  "replica-id",
  "tuple",
}
FREE_CALLS = {"AllocateBuffer", "Sharding"}  # targets of custom calls
# Estimates of the compiler for one instruction, the best first.
MODELS = "experimental-gemm-cost-model", "indexing-cost-model", ""

HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
NAMED = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = ")
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Instruction:
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
  """What executing a computation once amounts to.

  Attributes:
    launches: kernels by the name of the instruction, up to its first dot.
    copies: copies from memory to memory, which need no kernel.
    collectives: {kind: (how many, bytes of their results on one device)}.
    microseconds: time of the kernels that the compiler has a model of.
    cycles: the same, from compilers that count cycles.
    unmodelled: the kernels that it has no model of.
    unknown_loops: loops whose number of trips is unknown; they count as one.
  """

  launches: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  copies: int = 0
  collectives: dict[str, tuple[int, int]] = dataclasses.field(
    default_factory=dict
  )
  microseconds: float = 0.0
  cycles: int = 0
  unmodelled: int = 0
  unknown_loops: int = 0

  @property
  def num_launches(self) -> int:
    return self.launches.total()

  def add(self, other: "Profile", times: int = 1) -> None:
    """Adds another computation, executed some times."""
    for name, count in other.launches.items():
      self.launches[name] += count * times
    self.copies += other.copies * times
    for kind, (count, size) in other.collectives.items():
      before = self.collectives.get(kind, (0, 0))
      self.collectives[kind] = (
        before[0] + count * times,
        before[1] + size * times,
      )
    self.microseconds += other.microseconds * times
    self.cycles += other.cycles * times
    self.unmodelled += other.unmodelled * times
    self.unknown_loops += other.unknown_loops


def profile(text: str) -> Profile:
  """What one execution of an optimized HLO module amounts to."""
  return _Module(text).entry()


def received(program: Profile, num_devices: int) -> int:
  """Bytes that a device receives, if all devices take part in collectives.

  What a device sends to itself is left out; sums over devices are counted as a
  ring computes them.
  """
  share = (num_devices - 1) / num_devices
  factors = {
    "all-gather": share,
    "all-reduce": 2 * share,
    "all-to-all": share,
    "collective-permute": 1.0,
    "reduce-scatter": num_devices - 1.0,
  }
  return round(
    sum(factors[kind] * size for kind, (_, size) in program.collectives.items())
  )


class _Module:
  """The computations of a module."""

  def __init__(self, text):
    self._lines: dict[str, list[str]] = {}
    self._profiles: dict[str, Profile] = {}
    self._entry = name = None
    for line in text.splitlines():
      if name is None:
        if header := HEADER.match(line):
          name = header[2]
          self._lines[name] = []
          self._entry = name if header[1] else self._entry
      elif line.startswith("}"):
        name = None
      else:
        self._lines[name].append(line)
    if self._entry is None:
      raise ValueError("the text of the program has no entry computation")

  def entry(self):
    return self.profile(self._entry)

  def profile(self, name):
    """The profile of a computation, which others may share."""
    if name not in self._profiles:
      result = Profile()
      for instruction in _instructions(self._lines[name]):
        self._count(instruction, result)
      self._profiles[name] = result
    return self._profiles[name]

  def _count(self, instruction, result):
    opcode = instruction.opcode
    if opcode == "while":
      body, *_ = instruction.computations("body")
      trips = self._trips(instruction)
      result.unknown_loops += trips is None
      result.add(self.profile(body), 1 if trips is None else trips)
    elif opcode == "conditional":
      branches = [
        self.profile(name)
        for attribute in (
          "branch_computations",
          "true_computation",
          "false_computation",
        )
        for name in instruction.computations(attribute)
      ]
      result.add(max(branches, key=lambda branch: branch.num_launches))
    elif opcode == "call":
      for name in instruction.computations("to_apply"):
        result.add(self.profile(name))
    elif opcode == "async-start":
      for name in instruction.computations("calls"):
        result.add(self.profile(name))
    elif _is_copy(instruction):
      result.copies += 1
    elif not _is_free(instruction):
      _count_launch(instruction, result)
      self._count_collectives(instruction, result)
    elif opcode.removesuffix("-done") in COLLECTIVES:
      _add_collective(instruction, result)

  def _count_collectives(self, instruction, result):
    """A collective by itself or, since some are fused, those within it."""
    if instruction.opcode in COLLECTIVES:
      _add_collective(instruction, result)
    elif instruction.opcode in ("fusion", "fusion-start"):
      for name in instruction.computations("calls"):
        for inner in _instructions(self._lines[name]):
          if inner.opcode in COLLECTIVES:
            _add_collective(inner, result)

  def _trips(self, loop):
    """How often a loop runs: known to the compiler, or by its condition.

    A loop that counts from 0 by 1 up to a constant is assumed if the condition
    is one comparison with one constant.
    """
    if known := re.search(r'known_trip_count[":{]+n":"(\d+)"', loop.rest):
      return int(known[1])
    condition, *_ = loop.computations("condition")
    lines = list(_instructions(self._lines[condition]))
    limits = [
      int(constant[0])
      for x in lines
      if x.opcode == "constant" and (constant := re.match(r"\d+", x.rest))
    ]
    opcodes = {x.opcode for x in lines} - {"get-tuple-element", "parameter"}
    is_below = any("direction=LT" in x.rest for x in lines)
    if opcodes == {"constant", "compare"} and len(limits) == 1 and is_below:
      return limits[0]
    return None


def _instructions(lines: list[str]) -> Iterator[Instruction]:
  for line in lines:
    named = NAMED.match(line)
    if named is None:
      continue
    end = _end_of_shape(line, named.end())
    opcode, _, rest = line[end:].strip().partition("(")
    yield Instruction(named[1], line[named.end() : end], opcode, rest)


def _end_of_shape(line, start):
  """Where a shape ends: at the space after it that is in no parentheses."""
  depth = 0
  for i in range(start, len(line)):
    character = line[i]
    if character == "(":
      depth += 1
    elif character == ")":
      depth -= 1
    elif character == " " and not depth:
      return i
  return len(line)


def _is_free(instruction):
  if instruction.opcode == "custom-call":
    target = re.search(r'custom_call_target="([^"]*)"', instruction.rest)
    return target is not None and target[1] in FREE_CALLS
  return instruction.opcode in FREE or instruction.opcode.endswith("-done")


def _is_copy(instruction):
  """Whether memory is copied. Asynchronous loop fusions copy a slice."""
  is_slice = instruction.opcode == "fusion-start" and (
    "kind=kLoop" in instruction.rest
  )
  is_copy = instruction.opcode in ("copy", "copy-start")
  return is_slice or is_copy or instruction.opcode.endswith("slice-start")


def _count_launch(instruction, result):
  # Names end in numbers, and in what the compiler did: ".remat", ".clone".
  result.launches[instruction.name.partition(".")[0]] += 1
  cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.rest)
  microseconds = _modelled(instruction.rest)
  if cycles:
    result.cycles += int(cycles[1])
  elif microseconds is not None:
    result.microseconds += microseconds
  else:
    result.unmodelled += 1


def _modelled(rest):
  found = re.search(r'"reification_cost":(\[[^\]]*\])', rest)
  if not found:
    return None
  times = {row["name"]: row["exec_time_us"] for row in json.loads(found[1])}
  return next((times[name] for name in MODELS if name in times), None)


def _add_collective(instruction, result):
  """Counts a collective, or the end of one; its shape is that of the result."""
  kind = instruction.opcode.removesuffix("-done")
  count, size = result.collectives.get(kind, (0, 0))
  result.collectives[kind] = count + 1, size + num_bytes(instruction.shape)


def num_bytes(shape: str) -> int:
  """Bytes of a shape, without padding: "(bf16[8,128]{1,0}, s32[])" has 2,052.

  >>> num_bytes("(bf16[8,128]{1,0:T(8,128)(2,1)}, s32[])")
  2052
  """
  # Layouts contain no brackets, so that they never look like arrays.
  return sum(
    _num_bits(dtype, sizes) // 8 for dtype, sizes in ARRAY.findall(shape)
  )


def _num_bits(dtype, sizes):
  if dtype in ("token", "opaque"):
    return 0
  found = re.search(r"\d+", dtype)
  bits = int(found[0]) if found else 8  # pred
  for size in filter(None, sizes.split(",")):
    bits *= int(size)
  return bits
