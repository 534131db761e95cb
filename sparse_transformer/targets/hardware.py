"""The devices to compile for, and their names, such as "h100:1x1x8".

A GPU is described by a file beside this one, from which its compiler takes all
it knows; a TPU is known to its compiler by name.
"""

import dataclasses
import functools
import math
import pathlib
import re

from sparse_transformer import tables

GIB = 2**30
HERE = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of device."""

  description: str  # what it is
  compiler: str  # "cuda" or "tpu", also the platform that executors know
  # Usual topologies of one host, the smallest first; a name without a topology
  # means that one.
  sizes: tuple[str, ...]
  # Memory of one device in GiB; None for a GPU, whose file states it.
  gib: float | None = None

  @property
  def axes(self) -> str:
    """What the numbers of a topology count."""
    if self.compiler == "cuda":
      return "slices x hosts x GPUs"
    return " x ".join("XYZ"[: len(self.sizes[0].split("x"))])


_gpu = functools.partial(
  Kind, compiler="cuda", sizes=("1x1x1", "1x1x2", "1x1x4", "1x1x8")
)
_tpu = functools.partial(Kind, compiler="tpu", sizes=("1x1", "2x2", "2x4"))
# The memory of TPUs is what their compiler says is available.
KINDS = {
  "a100": _gpu("NVIDIA A100 SXM, 80 GB"),
  "h100": _gpu("NVIDIA H100 SXM, 80 GB"),
  "h200": _gpu("NVIDIA H200 SXM, 141 GB"),
  "rtx4090": _gpu("NVIDIA GeForce RTX 4090, 24 GB"),
  "v5e": _tpu("Cloud TPU v5e, 16 GB", gib=15.75),
  "v5p": _tpu("Cloud TPU v5p, 95 GB", sizes=("2x2x1", "2x2x2"), gib=95.73),
  "v6e": _tpu("Cloud TPU v6e, 32 GB", gib=31.24),
}


@dataclasses.dataclass(frozen=True)
class Target:
  """Devices to compile for."""

  kind: str  # a key of `KINDS`
  topology: str  # how many there are along each axis, "1x1x8"

  def __str__(self) -> str:
    return f"{self.kind}:{self.topology}"

  @property
  def compiler(self) -> str:
    return KINDS[self.kind].compiler

  @property
  def num_devices(self) -> int:
    return math.prod(map(int, self.topology.split("x")))

  @functools.cached_property
  def gpu_config(self) -> str:
    """The description of a GPU for its compiler, as a text proto."""
    return (HERE / f"{self.kind}.txtpb").read_text()

  @property
  def capability(self) -> float:
    """The compute capability of a GPU, 8.9; 0 for a TPU."""
    if self.compiler != "cuda":
      return 0.0
    words = r"cuda_compute_capability \{ major: (\d+)(?: minor: (\d+))?"
    found = re.search(words, self.gpu_config)
    assert found, f"{self.kind}.txtpb has no cuda_compute_capability"
    return float(f"{found[1]}.{found[2] or 0}")

  @property
  def memory(self) -> int:
    """Bytes of memory of one device."""
    if gib := KINDS[self.kind].gib:
      return int(gib * GIB)
    found = re.search(r"device_memory_size: (\d+)", self.gpu_config)
    assert found, f"{self.kind}.txtpb has no device_memory_size"
    return int(found[1])


def parse(name: str) -> Target:
  """The target of a name: "h100", "h100:1x1x8", "v5e:2x2".

  Raises:
    ValueError: the name is unknown, or its topology is malformed.
  """
  kind, _, topology = name.partition(":")
  if kind not in KINDS:
    raise ValueError(
      f"unknown target {name!r}; known: {', '.join(KINDS)}, each also with a"
      " topology (h100:1x1x8, v5e:2x2); --target=list describes them"
    )
  known = KINDS[kind]
  more = known.sizes[0].count("x")
  pattern = rf"[1-9]\d{{0,3}}(x[1-9]\d{{0,3}}){{{more}}}"
  if ":" in name and not re.fullmatch(pattern, topology):
    raise ValueError(
      f"target {name!r}: the topology of {kind} is {known.axes}, such as"
      f" {kind}:{known.sizes[-1]}"
    )
  return Target(kind, topology or known.sizes[0])


def describe() -> str:
  """A table of the known targets."""
  rows = [("target", "device", "memory", "topology", "default, others")]
  for name, kind in KINDS.items():
    size = f"{parse(name).memory / GIB:.2f} GiB"
    topologies = ", ".join(f"{name}:{topology}" for topology in kind.sizes)
    rows.append((name, kind.description, size, kind.axes, topologies))
  return tables.align(rows)
