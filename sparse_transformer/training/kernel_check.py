"""The check of fused kernels before a run first relies on them on a device.

It runs in a process of its own, because a kernel may hang or end it. That is
forked before this process uses the devices: a TPU belongs to one process at a
time, and XLA takes most of a GPU's memory. Where devices are in use already, or
several processes train together, this process checks.
"""

import contextlib
import dataclasses
import functools
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
from sparse_transformer.model import normalization
from sparse_transformer.training import costs
from sparse_transformer.training.experiment import Experiment

MAX_SECONDS = 300  # of a check, which usually takes a few
DRIVER = pathlib.Path("/proc/driver/nvidia/version")
# Parts of faults that may pass: the memory of the device may be free another
# time, and so a process not be killed. That of a block or core is never larger.
PASSING = "Out of memory", "memory space hbm", "status -9"


def avoid_wrong(experiment: Experiment) -> Experiment:
  """Avoids kernels whose results here differ from plain XLA's.

  "auto" does not choose backends of attention that differ, and norms do
  without their kernels. Prints a line on standard error for each.

  Args:
    experiment: whose network will run; devices should not be in use yet.

  Returns the experiment.
  """
  registry.avoid({})
  config = experiment.config
  model = experiment.model
  if not config.attention.check:
    return experiment

  # They name the platform, for which JAX must use the devices: only a process
  # that checks may call this.
  cases = lambda: _cases(config, model)
  is_used = xla_bridge.backends_are_initialized()
  is_used |= jax.distributed.is_initialized() or sys.platform != "linux"
  check = _verdicts if is_used else _verdicts_of_process

  # A check ends at the first fault. Then "auto" chooses others, which are
  # checked in turn.
  failed = []
  avoided = {}
  while verdicts := list(check(cases)):
    name, _, faults = verdicts[-1]
    if not faults:
      break
    failed.append(verdicts[-1])
    avoided[name] = "it failed its check"
    registry.avoid(avoided)

  for name, path, faults in failed:
    instead = "norms by plain XLA"
    if name != normalization.NAME:
      requests = costs.attention_requests(config, model)
      chosen = (registry.resolve("auto", x) for x in requests)
      instead = f"attention by {' and '.join(dict.fromkeys(chosen))}"
    kept = f"{path} has this verdict" if path.exists() else "it is not kept"
    print(
      f"warning: {instead}, not {name}, which failed its check:"
      f" {'; '.join(faults)}; {kept}",
      file=sys.stderr,
    )

  return experiment


def _cases(config, model):
  """Yields what to check: (name, what it is asked, a function: its faults).

  A single sequence on one device takes little time and memory, and its verdict
  serves all sizes of batches and meshes.
  """
  requests = []
  if config.attention.backend == "auto":
    requests = costs.attention_requests(config, model)
  for request in requests:
    # Plain XLA is what others are compared with. It is checked only in place of
    # one that failed, when something may be wrong with the device.
    name = registry.resolve("auto", request)
    if name in registry.PLAIN and not registry.avoided():
      continue

    request = dataclasses.replace(request, batch=1, tile=0, split=Split())
    report = functools.partial(verify_request, request, name)
    yield name, request, lambda report=report: report().faults

  stream = jax.ShapeDtypeStruct((1, model.length, model.width), model.dtype)
  if normalization.unsupported(stream, config.model.remat) is None:
    question = stream.shape, stream.dtype.name, model.dropout
    verify = functools.partial(normalization.verify, *question)
    yield normalization.NAME, question, verify


def _verdicts(cases):
  """Checks kernels in this process, until one has faults.

  Args:
    cases: a function that returns those of `_cases`.

  Yields (name, file of its verdict, faults). Before a check that may end the
  process, faults are None.
  """
  for name, question, find_faults in cases():
    path = _path(name, question)
    try:
      faults = atomic.read_json(path)
    except (OSError, ValueError):
      yield name, path, None
      faults = _kept(path, find_faults())

    yield name, path, faults
    if faults:
      return


def _verdicts_of_process(cases):
  """Yields `_verdicts` of another process, the end of which is one as well."""
  fork = multiprocessing.get_context("fork")
  ours, theirs = fork.Pipe(duplex=False)
  child = fork.Process(target=_send, args=(theirs, cases), daemon=True)
  child.start()

  # With only one open copy of its end, the pipe ends when the child does.
  theirs.close()
  last = None
  with contextlib.suppress(EOFError):
    while True:
      last = ours.recv()
      yield last
  child.join()

  # If it ended within a check, that is the verdict.
  if last and last[2] is None:
    name, path, _ = last
    fault = f"its process ended with status {child.exitcode}"
    if child.exitcode == -signal.SIGALRM:
      fault = f"it took more than {MAX_SECONDS} seconds"
    yield name, path, _kept(path, [fault])
  elif child.exitcode:
    print("warning: kernels cannot be checked", file=sys.stderr)


def _send(pipe, cases):
  """Sends `_verdicts` through a pipe; the main function of the process."""
  # The traces of a crash would look like those of the run.
  with open(os.devnull, "w") as nowhere:
    os.dup2(nowhere.fileno(), 2)

  # The run will need the memory that is left.
  os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
  try:
    jax.devices()
  # The run will raise the same error, and say what it means.
  except Exception:
    return

  # A kernel that hangs never returns to Python: only the default action of the
  # signal, which ends the process, can stop it.
  signal.signal(signal.SIGALRM, signal.SIG_DFL)
  signal.alarm(MAX_SECONDS)
  for verdict in _verdicts(cases):
    pipe.send(verdict)
    signal.alarm(MAX_SECONDS)


def _kept(path, faults):
  """Writes a verdict into its file, unless it may pass; returns the faults."""
  if any(x in fault for x in PASSING for fault in faults):
    return faults

  # Without the file, the next run checks again.
  with contextlib.suppress(OSError):
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
