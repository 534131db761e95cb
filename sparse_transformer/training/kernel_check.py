"""The check of fused kernels before a run first relies on them on a device.

It runs in a process of its own, because a kernel may hang or end it. That is
forked before this process uses the devices: a TPU belongs to one process at a
time, and XLA takes most of a GPU's memory. Where devices are in use already, or
several processes train together, this process checks.
"""

import contextlib
import dataclasses
import hashlib
import multiprocessing
import os
import pathlib
import signal
import sys
from importlib import metadata

import jax
from jax._src import xla_bridge  # nothing public says whether devices are used

from sparse_transformer import atomic
from sparse_transformer.attention import Split, registry, verify_request
from sparse_transformer.training import costs
from sparse_transformer.training.experiment import Experiment

MAX_SECONDS = 300  # of a check, which usually takes a few
DRIVER = pathlib.Path("/proc/driver/nvidia/version")
# Memory may be free another time; that of a block or core never is.
PASSING = "Out of memory", "memory space hbm", "status -9"


def avoid_wrong(experiment: Experiment) -> Experiment:
  """Makes "auto" avoid what does not compute here what plain XLA does.

  Prints a line on standard error for each executor that is avoided. Returns the
  experiment, for which it is called before devices are used.
  """
  registry.avoid({})
  config, model, failed = experiment.config, experiment.model, []
  requests = lambda: costs.attention_requests(config, model)
  if config.attention.backend != "auto" or not config.attention.check:
    return experiment
  is_used = xla_bridge.backends_are_initialized()
  is_used |= jax.distributed.is_initialized() or sys.platform != "linux"
  verdicts = _verdicts if is_used else _verdicts_of_process
  while (last := [*verdicts(requests)][-1:]) and last[0][2]:
    failed += last
    names = [name for name, _, _ in failed]
    registry.avoid(dict.fromkeys(names, "it failed its check"))
  for name, path, faults in failed:
    chosen = (registry.resolve("auto", x) for x in requests())
    kept = f"{path} has this verdict" if path.exists() else "it is not kept"
    print(
      f"warning: attention by {' and '.join(dict.fromkeys(chosen))}, not"
      f" {name}, which failed its check: {'; '.join(faults)}; {kept}",
      file=sys.stderr,
    )
  return experiment


def _verdicts(requests):
  """(executor, file of the verdict, its faults or None before a check)."""
  for request in requests():
    name = registry.resolve("auto", request)
    if name in registry.PLAIN and not registry.avoided():
      continue
    # A verdict is of few sequences on one device.
    request = dataclasses.replace(request, batch=1, tile=0, split=Split())
    path = _path(name, request)
    try:
      faults = atomic.read_json(path)
    except (OSError, ValueError):
      yield name, path, None
      faults = _kept(path, verify_request(request, name).faults)
    yield name, path, faults
    if faults:
      return


def _verdicts_of_process(requests):
  """`_verdicts` of a process of its own, whose end may be the last of them."""
  fork, last = multiprocessing.get_context("fork"), None
  ours, theirs = fork.Pipe(duplex=False)
  child = fork.Process(target=_send, args=(theirs, requests), daemon=True)
  child.start()
  theirs.close()
  with contextlib.suppress(EOFError):
    while True:
      yield (last := ours.recv())
  child.join()
  if last and last[2] is None:
    fault = f"its process ended with status {child.exitcode}"
    if child.exitcode == -signal.SIGALRM:
      fault = f"it took more than {MAX_SECONDS} seconds"
    yield *last[:2], _kept(last[1], [fault])
  elif child.exitcode:
    print("warning: kernels cannot be checked", file=sys.stderr)


def _send(pipe, requests):
  with open(os.devnull, "w") as nowhere:  # what a crash prints
    os.dup2(nowhere.fileno(), 2)
  os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
  try:
    jax.devices()
  except Exception:  # which the parent process will raise
    return
  signal.signal(signal.SIGALRM, signal.SIG_DFL)
  signal.alarm(MAX_SECONDS)  # ends the process
  for verdict in _verdicts(requests):
    pipe.send(verdict)
    signal.alarm(MAX_SECONDS)


def _kept(path, faults):
  if any(x in fault for x in PASSING for fault in faults):
    return faults
  with contextlib.suppress(OSError):  # it will be checked again
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_json(path, faults)
  return faults


def _path(*question):
  """The file of a verdict, whose name follows from all that it depends on."""
  device = jax.local_devices()[0]
  # cuDNN and the compilers of kernels are packages, too.
  packages = [f"{x.name} {x.version}" for x in metadata.distributions()]
  library = pathlib.Path(__file__).parents[1]
  identity = [
    question,
    device.device_kind,
    device.client.platform_version,
    jax.__version__,
    os.environ.get("XLA_FLAGS"),
    DRIVER.exists() and DRIVER.read_bytes(),
    sorted(packages),
    [path.read_bytes() for path in sorted(library.rglob("*.py"))],
  ]
  digest = hashlib.sha256(repr(identity).encode()).hexdigest()
  folder = jax.config.jax_compilation_cache_dir
  if not folder or "://" in folder:
    folder = os.path.expanduser("~/.cache/sparse_transformer/verdicts")
  return pathlib.Path(folder, f"verdict-{digest[:32]}.json")
