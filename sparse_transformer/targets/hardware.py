"""Absent devices to compile for, with names such as "h100:1x1x8".

For the devices of this machine, see `machine`. For the kind of device that a
program is traced for, see `attention.platforms`.
"""

import csv
import dataclasses
import math
import pathlib
import re
import string

from sparse_transformer import tables

GIB = 2**30
HERE = pathlib.Path(__file__).parent
with (HERE / "gpus.csv").open() as _file:
  GPUS = {row["target"]: row for row in csv.DictReader(_file)}


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of device.

  Attributes:
    description: the description, for `describe`.
    memory: the bytes of memory of one device.
    sizes: the usual topologies of one host: slices x hosts x GPUs for GPUs, or
      the axes of the torus for TPUs. The first topology is the smallest, and is
      the default for a name without a topology.
    compiler: "tpu" or "cuda", which is also the name of the platform for
      attention backends.
  """

  description: str
  memory: int
  sizes: tuple[str, ...]
  compiler: str = "tpu"


# GPUs are described in a file, because their compiler requires many numbers
# about each.
KINDS = {
  name: Kind(
    description=row["description"],
    memory=int(row["memory"]),
    sizes=("1x1x1", "1x1x2", "1x1x4", "1x1x8"),
    compiler="cuda",
  )
  for name, row in GPUS.items()
} | {
  # For TPUs, this is the memory that their compiler reports as available, which
  # is less than the nominal memory.
  "v5e": Kind("Cloud TPU v5e, 16 GB", int(15.75 * GIB), ("1x1", "2x2", "2x4")),
  "v5p": Kind("Cloud TPU v5p, 95 GB", int(95.73 * GIB), ("2x2x1", "2x2x2")),
  "v6e": Kind("Cloud TPU v6e, 32 GB", int(31.24 * GIB), ("1x1", "2x2", "2x4")),
}


@dataclasses.dataclass(frozen=True)
class Target:
  """Devices to compile for.

  Attributes:
    kind: a key of `KINDS`.
    topology: the number of devices along each axis, such as "1x1x8".

  Example:
    >>> target = parse("h100:1x1x8")
    >>> target.compiler, target.num_devices, target.capability
    ('cuda', 8, 9.0)
  """

  kind: str
  topology: str

  def __str__(self) -> str:
    return f"{self.kind}:{self.topology}"

  @property
  def compiler(self) -> str:
    """ "cuda" or "tpu"."""
    return KINDS[self.kind].compiler

  @property
  def memory(self) -> int:
    """Bytes of memory of one device."""
    return KINDS[self.kind].memory

  @property
  def num_devices(self) -> int:
    """The total number of devices."""
    return math.prod(map(int, self.topology.split("x")))

  @property
  def gpu_config(self) -> str:
    """The description of a GPU for its compiler, as a text-format proto."""
    template = string.Template((HERE / "gpu.txtpb").read_text())
    return template.substitute(GPUS[self.kind])

  @property
  def capability(self) -> float:
    """The compute capability of a GPU, such as 8.9; 0 for a TPU.

    Kernels need this number, because some kernels use instructions that older
    GPUs lack.
    """
    if self.kind not in GPUS:
      return 0.0
    row = GPUS[self.kind]
    return float(f"{row['major']}.{row['minor']}")


def parse(name: str) -> Target:
  """Parses the name of a target.

  Args:
    name: a kind, optionally with a topology: "h100", "h100:1x1x8", "v5e:2x2".

  Raises:
    ValueError: the kind is unknown, or the topology has the wrong number of
      axes.
  """
  kind, _, topology = name.partition(":")
  if kind not in KINDS:
    raise ValueError(
      f"unknown target {name!r}; known: {', '.join(KINDS)}, optionally with a"
      " topology (h100:1x1x8, v5e:2x2); --target=list describes them"
    )

  # Only the compiler can tell whether a topology of unusual size exists.
  sizes = KINDS[kind].sizes
  size = r"[1-9]\d{0,3}"
  axes = [size] * len(sizes[0].split("x"))
  if ":" in name and not re.fullmatch("x".join(axes), topology):
    raise ValueError(
      f"target {name!r}: {kind} has topologies such as {kind}:{sizes[-1]}"
    )
  return Target(kind, topology or sizes[0])


def describe() -> str:
  """Returns a table of the known targets, one per line."""
  rows = [("target", "device", "memory", "default, others")]
  for name, kind in KINDS.items():
    topologies = ", ".join(f"{name}:{topology}" for topology in kind.sizes)
    rows.append((name, kind.description, tables.size(kind.memory), topologies))
  return tables.align(rows)
