"""Measures our attention, and that of other libraries.

  python -m benchmarks.attention [--cases=3072,growth] [--rounds=N]

Writes results/attention-<machine>.json, whose columns docs/performance.md
explains. For each case, JAX and torch run in separate processes, and only one
of them computes at a time. `make bench` installs torch and the other libraries
from requirements-peers.txt. Without them, only our attention and JAX's own are
measured.
"""

import dataclasses
import json
import os
import platform
import subprocess
import sys

from benchmarks import record, report, timing
from benchmarks.worker import Entry, num_threads
from sparse_transformer import machine, version

sys.path.insert(0, str(record.REPO / "tests"))

from helpers import examples

THREADS = 2
PEERS = record.REPO / ".venv" / "peers"
OURS = "ours", "jax_nn"  # programs of the process with JAX
STRIDED = "Local({l}) | Strided({l})".format
FIXED = "Block(128) | Summary(128, 32)"
BIGBIRD = "BigBird(block=64, window=3, num_global=1, num_random=3, seed=0)"
MEASURED = (
  *("Causal()", "Local(128)", "Strided(128)", "Block(128)", "Summary(128, 32)"),
  *(STRIDED(l=128), FIXED, BIGBIRD),
)
ALGEBRA = (
  *("Local(23) | Strided(23)", "Block(32) | Summary(32, 8)"),
  *("Causal() - Block(64)", "Strided(16) & Local(128)"),
)


@dataclasses.dataclass(frozen=True)
class Case:
  """Entries whose measurements are interleaved."""

  title: str
  entries: tuple[Entry, ...]
  rounds: int = 0  # 0: only checks results


def oracle():
  """Returns causal examples of each pattern in the catalogue, and of unions."""
  causal = (found.causal for found in examples.STATIC.values())
  return *(str(pattern) for some in causal for pattern in some), *ALGEBRA


def _entries(n, programs):
  return tuple(Entry(x, p, n) for p in programs for x in programs[p])


def cases():
  checked = dict.fromkeys(oracle(), ("ours",))
  few = {
    "Local(64)": ("ours", "local_attention"),
    STRIDED(l=32): ("ours",),
    "Causal()": ("jax_nn", "sdpa"),
  }
  small = {
    "Local(128)": ("ours", "local_attention", "flex"),
    STRIDED(l=96): ("ours", "flex"),
    "Causal()": ("ours", "sdpa", "jax_nn"),
  }
  peers = {
    "Causal()": ("sdpa", "jax_nn"),
    "Local(128)": ("local_attention", "flex"),
    STRIDED(l=128): ("flex",),
    FIXED: ("flex",),
  }
  large = dict.fromkeys(MEASURED, ("ours",))
  growth = (Entry("ours", STRIDED(l=x), x**2) for x in (64, 128, 256, 512))
  million = Entry("ours", STRIDED(l=1024), 2**20, heads=1)
  groups = (
    Entry(program, pattern, 4096, heads=8, key_heads=2, documents=documents)
    for pattern in ("Local(128)", "Causal()")
    for documents in (0, 8)
    for program in ("ours", "jax_nn", "flex")
  )
  of_12288 = _entries(12_288, large) + _entries(12_288, peers)
  return {
    "quick": Case("quick, n = 1,024", _entries(1024, few), 2),
    "oracle": Case("the catalogue, n = 512", _entries(512, checked)),
    "3072": Case("n = 3,072", _entries(3072, small), 7),
    "12288": Case("n = 12,288", of_12288, 5),
    "growth": Case("growth with n, l = sqrt n", tuple(growth), 3),
    "million": Case("n = 1,048,576, one head", (million,), 1),
    "groups": Case("2 key heads for 8 heads, n = 4,096", tuple(groups), 7),
  }


class Process:
  """A worker process that answers requests, see `worker.Worker`."""

  def __init__(self, python, module):
    self.child = subprocess.Popen(
      [python, "-m", f"benchmarks.{module}"],
      cwd=record.REPO,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    self.versions = self("versions")
    if "failed" in self.versions:
      raise OSError(f"{module}: {self.versions['failed']}")

  def __call__(self, do, **arguments):
    """Returns the answer to a request.

    If the process has ended, the answer is {"failed": reason}.
    """
    try:
      request = json.dumps({"do": do, **arguments})
      print(request, file=self.child.stdin, flush=True)
      return json.loads(self.child.stdout.readline())
    except (BrokenPipeError, json.JSONDecodeError):
      return {"failed": f"the process ended with status {self.child.wait()}"}

  def close(self):
    self.child.stdin.close()
    self.child.wait()


def measure(case, rounds, processes):
  """Returns the rows of a case; if `rounds` is 0, it uses the case's number."""
  rounds = case.rounds and (rounds or case.rounds)
  rows, turns = [], []
  for entry in case.entries:
    process = processes.get("jax" if entry.program in OURS else "torch")
    if process is None:
      continue
    say(f"  preparing {entry.program} {entry.pattern} n = {entry.n:,}")
    row = dataclasses.asdict(entry)
    row |= process("prepare", entry=row)
    rows.append(row)
    index = row.pop("index", None)
    turns += [(row, process, index, x, []) for x in row.pop("passes", [])]
  for i in range(rounds):
    say(f"  round {i + 1} of {rounds}")
    for row, process, index, name, times in turns:
      answer = process("run", index=index, name=name)
      if "failed" in answer:
        row["failed"] = answer["failed"]
      else:
        times.append(answer["seconds"])
  for row, _, _, name, times in turns:
    if times:
      row[name] = timing.spread(times) | dict(rounds=times)
  return rows


def run(cases, rounds):
  about = {"name": machine.cpu_name(), "cores": os.cpu_count()}
  results = {
    "machine": about | {"threads": num_threads()},
    "python": platform.python_version(),
    "versions": {},
    "commit": version.commit(),
    "cases": {},
  }
  for name, case in cases.items():
    say(f"{name}: {case.title}")
    processes = {"jax": Process(sys.executable, "ours")}
    if (PEERS / "installed").exists():
      processes["torch"] = Process(PEERS / "bin" / "python", "peers")
    results["versions"] = {x: y.versions for x, y in processes.items()}
    rows = measure(case, rounds, processes)
    for process in processes.values():
      process.close()
    report.add_ratios(rows)
    results["cases"][name] = {"title": case.title, "rows": rows}
    yield results


def say(line):
  print(line, file=sys.stderr, flush=True)


def main():
  flags, known = record.parser(__doc__), cases()
  names = "names, separated by commas; default: all"
  flags.add_argument("--cases", default="", help=names)
  flags.add_argument("--rounds", type=int, default=0, help="rounds per case")
  args = flags.parse_args()
  names = [*filter(None, args.cases.split(","))] or [*known]
  if unknown := set(names) - set(known):
    sys.exit(f"unknown case {unknown.pop()!r}; known: {', '.join(known)}")
  if hasattr(os, "sched_setaffinity"):
    cpus = sorted(os.sched_getaffinity(0))[:THREADS]
    os.sched_setaffinity(0, cpus)  # inherited by the worker processes
  title = f"{machine.cpu_name()} {num_threads()} threads"
  out = args.out or record.path(record.slug(f"attention {title}"))
  for results in run({name: known[name] for name in names}, args.rounds):
    record.write(out, results)
  print(title)
  for case in results["cases"].values():
    print(f"\n{case['title']}\n{report.table(case['rows'])}")


if __name__ == "__main__":
  try:
    main()
  except OSError as error:
    sys.exit(f"attention: {error}")
