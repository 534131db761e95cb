"""Trains a model from a config file.

python train.py --config=configs/digits.py --workdir=runs/digits

Any field of the config can be overridden, for example with
--config.attention.pattern=fixed. If the workdir already contains a run, the
command resumes it from its last checkpoint; with --allow_changes, it can train
for more steps, or continue with other patterns or learning rates. After
SIGTERM, SIGINT or SIGHUP, it saves a checkpoint and exits with status 130; a
second SIGTERM or SIGINT ends it at once. --profile=FIRST:LAST traces these
steps and writes the trace into the folder `profile` of the workdir. With
--limit=processor_seconds:600 or --limit=seconds:600, the run ends after 600
seconds of training, and the learning rate is scheduled by time, not by steps.

A config file may define a function on_metrics(step, split, values) in addition
to get_config. It is called for each line of metrics.jsonl, for example to send
the values to another service.

Several processes, each with its own devices, can train one model. Start each
process with the same command and with --coordinator, --num_processes and
--process_id. On clusters where JAX can detect these three, use
--distributed=auto instead. See docs/scaling.md.
"""

import functools
import re
import sys
from collections.abc import Sequence

from sparse_transformer import cli, schema
from sparse_transformer.cli import config_flags, flags
from sparse_transformer.training import stopwatch

MAX_PROFILED = 100  # steps; each may take megabytes


def main(argv: Sequence[str]) -> None:
  """Starts a run, or resumes it."""
  cli.require("config", "workdir")
  args = flags.FLAGS
  named = args.coordinator, args.num_processes, args.process_id
  are_named = named != (None, None, None)
  if args.distributed and are_named:
    raise ValueError(
      "--distributed=auto detects --coordinator, --num_processes and"
      " --process_id; omit these flags, or omit --distributed"
    )
  are_several = are_named or args.distributed is not None
  # Each process has its own clock, so they would stop at different steps.
  if args.limit and are_several:
    raise ValueError(
      "--limit requires a single process; omit --limit, or omit --coordinator,"
      " --num_processes, --process_id and --distributed"
    )

  limit = args.limit and stopwatch.parse_limit(args.limit, "limit")
  profile = _profiled(args.profile, schema.typed(args.config).train.steps)

  # ml_collections imports the config file as this module. The file may define
  # on_metrics.
  module = sys.modules.get("config_config")
  from sparse_transformer import machine
  from sparse_transformer.training.distributed import processes
  from sparse_transformer.training.loop import train

  machine.keep_freed_memory()

  # This must precede any use of devices, so that JAX sees the devices of all
  # processes.
  if are_several:
    processes.join(
      args.coordinator,
      num_processes=args.num_processes,
      process_id=args.process_id,
      initialization_timeout=args.connect_seconds,
      heartbeat_timeout_seconds=args.heartbeat_seconds,
    )

  train(
    args.config,
    args.workdir,
    config_file=config_flags.get_config_filename(args["config"]),
    limit=limit,
    allow_changes=args.allow_changes,
    on_metrics=getattr(module, "on_metrics", None),
    profile=profile,
  )


def _profiled(text, steps):
  """Returns the range of steps to trace, parsed from FIRST:LAST.

  Returns () if the flag is not given. Raises ValueError if some of the steps
  are not in the run, or if there are more than `MAX_PROFILED`.
  """
  if text is None:
    return ()
  match = re.fullmatch("([0-9]{1,18}):([0-9]{1,18})", text)
  first, last = map(int, match.groups()) if match else (0, 0)
  if not 1 <= first <= last <= min(steps, first + MAX_PROFILED - 1):
    raise ValueError(
      f"--profile={text} must be FIRST:LAST with 1 <= FIRST <= LAST <= {steps}"
      f" (the last step of the run), and cover at most {MAX_PROFILED} steps"
    )
  return range(first, last + 1)


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Folder to which the run is written.")
  flags.DEFINE_boolean(
    "allow_changes",
    False,
    "Allows a resumed run to change attention.*, optimizer.* (except"
    " optimizer.name), train.steps, train.batch_size, train.accumulation and"
    " eval.sequences.",
  )
  flags.DEFINE_string("profile", None, "The steps to trace, as FIRST:LAST.")
  flags.DEFINE_string(
    "limit",
    None,
    "Training time after which the run ends: seconds:N (elapsed time) or"
    " processor_seconds:N (CPU time).",
  )
  flags.DEFINE_string(
    "coordinator", None, "Address of the first process, as HOST:PORT."
  )
  DEFINE_count = functools.partial(
    flags.DEFINE_integer, lower_bound=1, upper_bound=2**31 - 1
  )
  DEFINE_count("num_processes", None, "Number of processes that train the run.")
  flags.DEFINE_integer(
    "process_id", None, "Index of this process, counted from 0.", 0
  )
  flags.DEFINE_enum(
    "distributed",
    None,
    ["auto"],
    "Detects --coordinator, --num_processes and --process_id, for example on"
    " Slurm or TPU pods.",
  )
  DEFINE_count(
    "connect_seconds", 300, "Seconds to wait for the other processes at start."
  )
  DEFINE_count(
    "heartbeat_seconds",
    100,
    "Seconds after which a process that sends no heartbeat counts as lost.",
  )
  cli.run(main, cli.on_config)
