"""Resources that the hand-written kernels of a GPU program take.

The compiler is told to write the code of all kernels, and the list of what it
launches, into a folder. NVIDIA's assembler reports how many registers each
kernel needs, and how much it spills to memory. Mosaic GPU compiles its own
kernels, and writes what the assembler says of them, besides much else.
"""

import pathlib
import re
import subprocess
import sysconfig
from typing import Any

LIBRARIES = pathlib.Path(sysconfig.get_paths()["purelib"])
PTXAS = LIBRARIES / "nvidia" / "cuda_nvcc" / "bin" / "ptxas"
# Kernels of Pallas, which are named after their functions.
KERNEL_CALL = re.compile(r'custom_call_target="__gpu\$xla\.gpu\.triton"')
LAUNCH = re.compile(
  r"\d+: kCustomKernel .*?\] (?P<name>\S+) grid: \[(?P<grid>[^\]]*)\]"
  r" threads: \[(?P<threads>[^\]]*)\]\s+shared_memory: (?P<shared>\d+) bytes"
)


def flags(folder: pathlib.Path) -> list[str]:
  """The flags of XLA that write what `read` reads."""
  return [f"--xla_dump_to={folder}", "--xla_dump_emitter_re=ptx"]


def environment(folder: pathlib.Path) -> dict[str, str]:
  """The variables with which Mosaic GPU writes what `read` reads."""
  return dict(MOSAIC_GPU_DUMP_TO=str(folder))


def read(
  folder: pathlib.Path, hlo: str, ptxas: pathlib.Path = PTXAS
) -> list[dict[str, Any]]:
  """Registers, spills and shared memory of each hand-written kernel.

  The compiler has written the code of the program `hlo` into the folder.
  """
  own = {
    name
    for line in hlo.splitlines()
    if KERNEL_CALL.search(line)
    for name in re.findall(r"(\w+)\)*/pallas_call", line)  # jvp(forward)/...
  }
  shared = {
    found["name"]: found.groupdict()
    for path in folder.glob("*thunk_sequence.txt")
    for found in map(LAUNCH.search, path.read_text().splitlines())
    if found
  }
  result = [*map(_read_mosaic, folder.glob("*.ptxas"))]
  for path in sorted(folder.glob("*.ptx")):
    code = path.read_text()
    for entry in re.findall(r"\.entry (\w+)\(", code):
      if re.sub(r"_+\d+$", "", entry) in own:  # "backward_of_keys__1"
        found = re.search(r"^\.target (\w+)", code, re.MULTILINE)
        assert found, f"{path} has no .target"
        done = subprocess.run(
          [ptxas, "-v", "-arch", found[1], path, "-o", "/dev/null"],
          capture_output=True,
          text=True,
          check=True,
        )
        launch = shared.get(entry, {})
        result.append(
          dict(
            kernel=entry,
            **parse_assembly(done.stderr),
            copies_in_flight=copies_in_flight(code),
            shared_bytes=int(launch.get("shared", 0)),
            grid=launch.get("grid", ""),
            threads=launch.get("threads", ""),
          )
        )
  return sorted(result, key=lambda kernel: kernel["kernel"])


def _read_mosaic(path):
  """The same, of a kernel of Mosaic GPU, from the assembler's log."""
  name = re.sub(r"_\d+$", "", path.stem)
  # Written as it is lowered, with another number.
  shared = [
    int(size)
    for other in path.parent.glob(f"{name}_*.resources.txt")
    for size in re.findall(r"smem_scratch_bytes=(\d+)", other.read_text())
  ]
  return dict(
    kernel=name,
    **parse_assembly(path.read_text()),
    copies_in_flight=None,
    shared_bytes=max(shared, default=0),
    grid="",
    threads="",
  )


def copies_in_flight(code: str) -> int | None:
  """The fewest groups of copies that a loop leaves in flight when it waits.

  Loops that copy to shared memory, in the PTX of a kernel; None without any.
  """
  loops = re.finditer(
    r"^(\$\w+):\n((?:(?!^\$).*\n)*?.*\bbra(?:\.uni)?\s+\1;)", code, re.MULTILINE
  )
  waits = [
    int(groups)
    for loop in loops
    for groups in re.findall(r"cp\.async\.wait_group\s+(\d+);", loop[2])
  ]
  return min(waits, default=None)


def parse_assembly(log: str) -> dict[str, int]:
  """Registers of a thread and bytes that it spills, from `ptxas -v`."""
  registers, stores, loads = (
    max(map(int, re.findall(rf"(\d+) {what}", log)), default=0)
    for what in ("registers,", "bytes spill stores", "bytes spill loads")
  )
  return dict(registers=registers, spilled_bytes=stores + loads)
