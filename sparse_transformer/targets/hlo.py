"""Reads a compiled program: its launches, collectives and bytes moved.

The text of an optimized HLO module lists its computations. One execution of the
entry launches each of its instructions once, those of a loop's body as often as
the loop runs. Of the branches of a conditional, the one with the most launches
is counted.
"""

import collections
import dataclasses
import re

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
SLICED = "dynamic-slice", "dynamic-update-slice"

HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
NAMED = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = ")
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


Counts = collections.Counter[str]


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

  @property
  def operands(self) -> list[str]:
    return re.findall(r"%([\w.\-]+)", self.rest.partition(")")[0])


@dataclasses.dataclass
class Profile:
  """Cost of one execution."""

  # Kernels by the name of the instruction, up to its first dot.
  launches: Counts = dataclasses.field(default_factory=collections.Counter)
  # Bytes that these kernels read and write, by the same names.
  moved: Counts = dataclasses.field(default_factory=collections.Counter)
  copies: int = 0  # copies from memory to memory, which need no kernel
  # {kind: (how many, bytes of their results on one device)}.
  collectives: dict[str, tuple[int, int]] = dataclasses.field(
    default_factory=dict
  )
  # Loops whose number of trips is unknown; they count as one.
  unknown_loops: int = 0

  @property
  def num_launches(self) -> int:
    return self.launches.total()

  def add(self, other: "Profile", times: int = 1) -> None:
    """Adds another computation, executed `times` times."""
    for name, count in other.launches.items():
      self.launches[name] += count * times
      self.moved[name] += other.moved[name] * times
    self.copies += other.copies * times
    for kind, (count, size) in other.collectives.items():
      self.add_collective(kind, count * times, size * times)
    self.unknown_loops += other.unknown_loops

  def add_collective(self, kind: str, count: int, size: int) -> None:
    """Adds collectives of a kind."""
    before = self.collectives.get(kind, (0, 0))
    self.collectives[kind] = before[0] + count, before[1] + size


def profile(text: str) -> Profile:
  """The cost of one execution of an optimized HLO module."""
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
      result, instructions = Profile(), _instructions(self._lines[name])
      for instruction in instructions.values():
        self._count(instruction, instructions, result)
      self._profiles[name] = result
    return self._profiles[name]

  def _count(self, instruction, instructions, result):
    opcode = instruction.opcode
    if opcode == "while":
      body, *_ = instruction.computations("body")
      trips = self._trips(instruction)
      result.unknown_loops += trips is None
      result.add(self.profile(body), 1 if trips is None else trips)
    elif opcode == "conditional":
      branches = [
        self.profile(name)
        for attribute in BRANCHES
        for name in instruction.computations(attribute)
      ]
      result.add(max(branches, key=lambda branch: branch.num_launches))
    elif opcode in CALLS:
      for name in instruction.computations(CALLS[opcode]):
        result.add(self.profile(name))
    elif _is_copy(instruction):
      result.copies += 1
    elif not _is_free(instruction):
      # Names end in numbers, and in what the compiler did: ".remat", ".clone".
      name = instruction.name.partition(".")[0]
      result.launches[name] += 1
      result.moved[name] += self._moved(instruction, instructions)
      self._count_collectives(instruction, result)
    elif opcode.removesuffix("-done") in COLLECTIVES:
      _add_collective(instruction, result)

  def _moved(self, instruction, instructions):
    """Bytes that a kernel reads and writes."""
    if instruction.opcode not in ("fusion", "fusion-start"):
      read = (
        _read(name, instructions, [instruction])
        for name in dict.fromkeys(instruction.operands)
      )
      return sum(read) + _written(instruction, instructions)
    (name,) = instruction.computations("calls")
    inner = _instructions(self._lines[name])
    *_, root = inner.values()
    parameters = (x.name for x in inner.values() if x.opcode == "parameter")
    read = (_read(name, inner, inner.values()) for name in parameters)
    return sum(read) + _written(root, inner)

  def _count_collectives(self, instruction, result):
    """A collective by itself or, since some are fused, those within it."""
    if instruction.opcode in COLLECTIVES:
      _add_collective(instruction, result)
    elif instruction.opcode in ("fusion", "fusion-start"):
      for name in instruction.computations("calls"):
        for inner in _instructions(self._lines[name]).values():
          if inner.opcode in COLLECTIVES:
            _add_collective(inner, result)

  def _trips(self, loop):
    """Trips of a loop, as known to the compiler or by its condition.

    A loop that counts from 0 by 1 up to a constant is assumed if the condition
    is one comparison with one constant.
    """
    if known := re.search(r'known_trip_count[":{]+n":"(\d+)"', loop.rest):
      return int(known[1])
    condition, *_ = loop.computations("condition")
    lines = _instructions(self._lines[condition]).values()
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


def _instructions(lines: list[str]) -> dict[str, Instruction]:
  """The instructions of a computation, by name."""
  found = {}
  for line in lines:
    if named := NAMED.match(line):
      end = _end_of_shape(line, named.end())
      shape = line[named.end() : end]
      opcode, _, rest = line[end:].strip().partition("(")
      found[named[1]] = Instruction(named[1], shape, opcode, rest)
  return found


def _read(name, instructions, users):
  """Bytes that users read of an array: all of it, unless they slice it."""
  if name not in instructions:
    return 0
  users = [x for x in users if name in x.operands]
  if len(users) == 1 and users[0].opcode == "bitcast":
    return _read(users[0].name, instructions, instructions.values())
  if users and all(x.opcode in SLICED and x.operands[0] == name for x in users):
    reads = (x for x in users if x.opcode == "dynamic-slice")
    return sum(num_bytes(x.shape) for x in reads)
  return num_bytes(instructions[name].shape)


def _written(instruction, instructions):
  """Bytes that an instruction writes: of an update in place, the update."""
  source = [instructions[x] for x in instruction.operands if x in instructions]
  if instruction.opcode == "dynamic-update-slice" and len(source) > 1:
    return num_bytes(source[1].shape)
  if instruction.opcode in ("bitcast", "tuple") and source:
    return sum(_written(x, instructions) for x in source)
  return num_bytes(instruction.shape)


def _end_of_shape(line, start):
  """The end of a shape: the space after it that is in no parentheses."""
  depth = 0
  for i in range(start, len(line)):
    depth += (line[i] == "(") - (line[i] == ")")
    if line[i] == " " and not depth:
      return i
  return len(line)


def _is_free(instruction):
  if instruction.opcode == "custom-call":
    target = re.search(r'custom_call_target="([^"]*)"', instruction.rest)
    return target is not None and target[1] in FREE_CALLS
  return instruction.opcode in FREE or instruction.opcode.endswith("-done")


def _is_copy(instruction):
  """Checks for copies of memory. Asynchronous loop fusions copy a slice."""
  is_slice = instruction.opcode == "fusion-start" and (
    "kind=kLoop" in instruction.rest
  )
  is_copy = instruction.opcode in ("copy", "copy-start")
  return is_slice or is_copy or instruction.opcode.endswith("slice-start")


def _add_collective(instruction, result):
  """Counts a collective, or the end of one; its shape is the result's."""
  kind = instruction.opcode.removesuffix("-done")
  result.add_collective(kind, 1, num_bytes(instruction.shape))


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
