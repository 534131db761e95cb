"""Resources that the hand-written kernels of a compiled GPU program take.

The compiler writes the code of all kernels, and the list of what it launches,
into a folder. NVIDIA's assembler says how many registers each kernel needs, and
how much it spills to memory.
"""

import re
import subprocess

from sparse_transformer.targets import compilers

# Kernels of Pallas, which are named after their functions.
KERNEL_CALL = re.compile(r'custom_call_target="__gpu\$xla\.gpu\.triton"')
LAUNCH = re.compile(
  r"\d+: kCustomKernel .*?\] (?P<name>\S+) grid: \[[^\]]*\]"
  r" threads: \[(?P<threads>\d+)[^\]]*\]\s+shared_memory: (?P<shared>\d+) bytes"
)


def variables(folder, *flags):
  """The environment in which compilers write what `kernels` reads."""
  dump = f"--xla_dump_to={folder}", "--xla_dump_emitter_re=ptx"
  return dict(XLA_FLAGS=" ".join((*dump, *flags)))


def kernels(folder):
  """{name: registers, spilled_bytes, shared_bytes, ...} of all kernels."""
  own = {
    name
    for path in folder.glob("*after_optimizations.txt")
    for line in path.read_text().splitlines()
    if KERNEL_CALL.search(line)
    for name in re.findall(r"(\w+)\)*/pallas_call", line)  # jvp(forward)/...
  }
  launches = {
    found["name"]: found
    for path in folder.glob("*thunk_sequence.txt")
    for found in LAUNCH.finditer(path.read_text())
  }
  result = {}
  for path in folder.glob("*.ptx"):
    code = path.read_text()
    for name in re.findall(r"\.entry (\w+)\(", code):
      if re.sub(r"_+\d+$", "", name) in own:  # "backward_of_keys__1"
        result[name] = _assemble(path, code) | dict(
          copies_in_flight=_copies_in_flight(code),
          shared_bytes=int(launches[name]["shared"]),
          threads=int(launches[name]["threads"]),
        )

  return result


def _assemble(path, code):
  environment = compilers.python("cuda").parents[1]
  (ptxas,) = environment.glob("lib/*/site-packages/nvidia/cuda_nvcc/bin/ptxas")
  target = re.search(r"^\.target (\w+)", code, re.MULTILINE)[1]
  command = [ptxas, "-v", "-arch", target, path, "-o", "/dev/null"]
  done = subprocess.run(
    command,
    capture_output=True,
    text=True,
    check=True,
  )
  return _resources(done.stderr)


def _resources(log):
  """Registers of a thread and bytes that it spills, from `ptxas -v`."""
  registers, stores, loads = (
    max(map(int, re.findall(rf"(\d+) {what}", log)), default=0)
    for what in ("registers,", "bytes spill stores", "bytes spill loads")
  )
  return dict(
    registers=registers,
    spilled_bytes=stores + loads,
  )


def _copies_in_flight(code):
  """The fewest groups of copies that a loop leaves in flight when it waits."""
  loops = re.finditer(
    r"^(\$\w+):\n((?:(?!^\$).*\n)*?.*\bbra(?:\.uni)?\s+\1;)", code, re.MULTILINE
  )
  waits = (
    int(groups)
    for loop in loops
    for groups in re.findall(r"cp\.async\.wait_group\s+(\d+);", loop[2])
  )
  return min(waits, default=0)
