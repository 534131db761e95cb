"""Our attention beside its peers: one run, in turns, medians of rounds.

  python benchmarks/attention.py [--cases=3072,growth] [--rounds=N] [--quick]

Prints tables and writes results/attention-<machine>.json. Two processes hold
the contestants, one for JAX and one for torch; only one of them computes at a
time. In each round of a case every contestant has its turn. The peers live in
an environment of their own, .peers, made from requirements-peers.txt. On a
GPU the cases are in bfloat16 and the peer is cuDNN's attention.

Ratios: roof is the time limit of the device for the pairs of a pattern over
the time measured, with the matmul, copy and exp rates of the same run;
speed-up is over the best dense causal attention of the same size, ideal is
that of the pairs; waste is the area of the tiles that hold pairs over the
pairs. Peak is the growth of resident memory in a pass, temp what the compiler
sets aside.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import re
import shutil
import statistics
import subprocess
import sys

import cases as cases_lib
import report

HERE = pathlib.Path(__file__).resolve().parent
PEERS = HERE / ".peers"
REQUIREMENTS = HERE / "requirements-peers.txt"


class Process:
  """A worker process and the line to it."""

  def __init__(self, python, script):
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    self.child = subprocess.Popen(
      [python, HERE / script],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    self.about = self("hello")
    if "failed" in self.about:
      raise OSError(f"{script}: {self.about['failed']}")

  def __call__(self, do, **order):
    """The answer to an order; a process that has died answers so, too."""
    try:
      print(json.dumps({"do": do, **order}), file=self.child.stdin, flush=True)
      return json.loads(self.child.stdout.readline())
    except (BrokenPipeError, json.JSONDecodeError):
      return {"failed": f"the process ended with status {self.child.wait()}"}

  def close(self):
    self.child.stdin.close()
    self.child.wait()


def peers_python():
  """The Python of the peers' environment, which is made where it is missing.

  Their Python may be another one than ours: it is the first for which pip
  finds all of them.
  """
  python, marker = PEERS / "bin" / "python", PEERS / "installed"
  if marker.exists() and marker.read_text() == REQUIREMENTS.read_text():
    return python
  names = [f"python3.{minor}" for minor in (13, 12, 11)]
  found = filter(None, map(shutil.which, names))
  for base in (sys.executable, *found):
    say(f"peers: installing them with {pathlib.Path(base).name}")
    pip = python, "-m", "pip", "install", "-r", REQUIREMENTS
    failure = failed(base, "-m", "venv", "--clear", PEERS) or failed(*pip)
    if not failure:
      (PEERS / ".gitignore").write_text("*\n")
      marker.write_text(REQUIREMENTS.read_text())
      return python
  shutil.rmtree(PEERS, ignore_errors=True)
  raise OSError(failure)


def failed(*command):
  """The last line a command says if it fails, else ""."""
  done = subprocess.run(command, capture_output=True, text=True)
  lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
  return lines[-1] if done.returncode else ""


def start_peers(install):
  """(their process or None, why there is none)."""
  if not install and not (PEERS / "installed").exists():
    return None, "not installed"
  try:
    return Process(peers_python(), "peers.py"), ""
  except OSError as error:
    return None, f"{error}"


def measure(case, ours, peers, why_no_peers):
  """Runs a case: its rows."""
  rows, turns = [], []
  for entry in case.entries:
    say(f"  preparing {entry.program} {entry.pattern} n = {entry.n:,}")
    process = ours if entry.program in ("ours", "jax_nn") else peers
    row = dataclasses.asdict(entry)
    if reason := row.pop("skip"):
      row["failed"] = reason
    elif process is None:
      row["failed"] = f"no peers: {why_no_peers}"
    else:
      row |= process("prepare", entry=dataclasses.asdict(entry))
    rows.append(row)
    index = row.pop("index", None)
    for name in row.pop("passes", []):
      turns.append((row, process, index, name, []))
  for i in range(case.rounds):
    say(f"  round {i + 1} of {case.rounds}")
    for row, process, index, name, times in turns:
      answer = process("run", index=index, name=name)
      if "failed" in answer:
        row["failed"] = answer["failed"]
      else:
        times.append(answer["seconds"])
  for row, _, _, name, times in turns:
    if times:
      row[name] = {
        "median": statistics.median(times),
        "min": min(times),
        "max": max(times),
        "rounds": times,
      }
  for process in filter(None, (ours, peers)):
    process("forget")
  return rows


def run(ours, peers, why_no_peers, cases):
  """Runs the cases; yields the results so far after each of them."""
  processes = {"jax": ours} | ({"torch": peers} if peers else {})
  results = {
    "machine": machine(ours.about),
    "python": platform.python_version(),
    "versions": {name: p.about["versions"] for name, p in processes.items()},
    "commit": commit(),
    "rates": {"matmul": 0, "copy": 0, "exp": 0},
    "cases": {},
  }
  for name, case in cases.items():
    say(f"{name}: {case.title}")
    raise_rates(results["rates"], processes.values())
    process = Process(sys.executable, "ours.py") if case.alone else ours
    rows = measure(case, process, peers, why_no_peers)
    if case.alone:
      process.close()
    else:
      for row in rows:
        row.pop("process_bytes", None)  # of all contestants so far
    raise_rates(results["rates"], processes.values())
    results["cases"][name] = {"title": case.title, "rows": rows}
    for known in results["cases"].values():  # the rates may have risen
      report.add_ratios(known["rows"], results["rates"])
    yield results


def raise_rates(rates, processes):
  """Raises the rates to the best seen, which other work cannot exceed."""
  for process in processes:
    found = process("rates")
    for key in rates:
      rates[key] = max(rates[key], found.get(key, 0))


def machine(about):
  """The device and what of it is used."""
  name = about["device"]
  if about["backend"] == "cpu":
    name = platform.processor() or platform.machine()
    if pathlib.Path("/proc/cpuinfo").exists():
      text = pathlib.Path("/proc/cpuinfo").read_text()
      found = re.search(r"model name\s*: (.*)", text)
      name = found[1] if found else name
  return {"name": name, "cores": os.cpu_count(), "threads": about["threads"]}


def commit():
  """The short hash of the working tree's commit, or None."""
  command = ["git", "describe", "--always", "--dirty"]
  try:
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
  except OSError:
    return None
  return done.stdout.strip() or None


def show(results):
  """Prints the tables of the results."""
  print("{name}, {cores} cores, {threads} threads".format(**results["machine"]))
  print(
    "matmul {matmul:.3g} FLOP/s, copy {copy:.3g} bytes/s, exp {exp:.3g}/s,"
    " the best seen of jax and torch".format(**results["rates"])
  )
  for case in results["cases"].values():
    print(f"\n{case['title']}\n{report.table(case['rows'])}")
  print(f"\nsummary\n{report.summary(results['cases'])}")


def say(line):
  print(line, file=sys.stderr, flush=True)


def choose(cases, names, rounds):
  """The named cases, or all; with other rounds, if they have any."""
  unknown = set(names) - set(cases)
  if unknown:
    sys.exit(f"unknown case {unknown.pop()!r}; known: {', '.join(cases)}")
  return {
    name: dataclasses.replace(case, rounds=case.rounds and rounds)
    if rounds
    else case
    for name, case in cases.items()
    if not names or name in names
  }


def parse():
  flags = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  flags.add_argument(
    "--cases", default="", help="names, by commas; all if none is given"
  )
  flags.add_argument("--rounds", type=int, default=0, help="of every case")
  flags.add_argument(
    "--no-peers", dest="peers", action="store_false", help="without torch"
  )
  flags.add_argument("--threads", type=int, default=2)
  flags.add_argument("--out", type=pathlib.Path, help="JSON file to write")
  flags.add_argument(
    "--quick",
    action="store_true",
    help="one small case; peers if they are installed; no file but --out",
  )
  return flags.parse_args()


def main():
  flags = parse()
  if hasattr(os, "sched_setaffinity"):
    cpus = sorted(os.sched_getaffinity(0))[: flags.threads]
    os.sched_setaffinity(0, cpus)  # for the processes that follow, too
  ours = Process(sys.executable, "ours.py")
  on_gpu = ours.about["backend"] == "gpu"
  cases = cases_lib.gpu() if on_gpu else cases_lib.cpu()
  cases = cases_lib.quick() if flags.quick else cases
  cases = choose(
    cases, list(filter(None, flags.cases.split(","))), flags.rounds
  )
  peers, why = None, "not asked for"
  if flags.peers and not on_gpu:
    peers, why = start_peers(install=not flags.quick)
  if peers is None:
    say(f"no torch peers: {why}")
  out = flags.out
  for results in run(ours, peers, why, cases):
    if out is None and not flags.quick:
      out = HERE / "results" / f"attention-{slug(results['machine'])}.json"
    if out:
      out.parent.mkdir(parents=True, exist_ok=True)
      out.write_text(json.dumps(results, indent=1) + "\n")
  show(results)
  for process in filter(None, (ours, peers)):
    process.close()


def slug(machine):
  text = "{name} {threads} threads".format(**machine).lower()
  return "-".join(re.findall("[a-z0-9]+", text))


if __name__ == "__main__":
  main()
