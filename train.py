"""Trains a model from a config file.

python train.py --config=configs/digits.py --workdir=runs/digits

Any field of the config can be overridden: --config.attention.pattern=fixed.
Restarted with the same workdir, it resumes from the last checkpoint; with
--allow_changes, also for more steps, or with other patterns or learning rates.
SIGTERM, SIGINT and SIGHUP make it save a checkpoint and exit with status 130;
a second SIGTERM or SIGINT ends it. --profile=FIRST:LAST traces steps into the
folder `profile` of the workdir. With --limit=processor_seconds:600 or
--limit=seconds:600, that much time of training ends the run, and the learning
rate follows the clock.

A config file may define on_metrics(step, split, values) beside get_config: it
is called for each line of metrics.jsonl, to send it elsewhere.

Several processes, each with its own devices, train together: start each with
the same command and --coordinator, --num_processes and --process_id; or, where
the cluster says these, with --distributed=auto. See docs/scaling.md.
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
  """Trains a run, or resumes it."""
  cli.require("config", "workdir")
  args = flags.FLAGS
  named = args.coordinator, args.num_processes, args.process_id
  are_named = named != (None, None, None)
  if args.distributed and are_named:
    raise ValueError(
      "--distributed=auto finds --coordinator, --num_processes and --process_id"
      " out; give either it or them"
    )
  are_several = are_named or args.distributed is not None
  # Each process has its own clock, and they would stop at different steps.
  if args.limit and are_several:
    raise ValueError("--limit is for one process: omit --coordinator etc.")

  limit = args.limit and stopwatch.parse_limit(args.limit, "limit")
  profile = _profiled(args.profile, schema.typed(args.config).train.steps)

  # Where ml_collections leaves the config file, which may define on_metrics.
  module = sys.modules.get("config_config")
  from sparse_transformer import machine
  from sparse_transformer.training.distributed import processes
  from sparse_transformer.training.loop import train

  machine.keep_freed_memory()

  # Before anything asks for devices: JAX then knows those of all processes.
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
  """The range of the steps to trace, from FIRST:LAST; () without the flag.

  Raises ValueError if these are no steps of the run, or too many.
  """
  if text is None:
    return ()
  match = re.fullmatch("([0-9]{1,18}):([0-9]{1,18})", text)
  first, last = map(int, match.groups()) if match else (0, 0)
  if not 1 <= first <= last <= min(steps, first + MAX_PROFILED - 1):
    raise ValueError(
      f"--profile={text} must be FIRST:LAST, with 1 <= FIRST <= LAST <= {steps}"
      f", the steps of the run, and name at most {MAX_PROFILED} of them"
    )
  return range(first, last + 1)


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Folder that the run writes to.")
  flags.DEFINE_boolean(
    "allow_changes",
    False,
    "Resumes with other attention.*, optimizer.* (except name), train.steps,"
    " train.batch_size, train.accumulation and eval.sequences.",
  )
  flags.DEFINE_string("profile", None, "FIRST:LAST, the steps to trace.")
  flags.DEFINE_string(
    "limit", None, "seconds:N or processor_seconds:N of training end the run."
  )
  flags.DEFINE_string("coordinator", None, "HOST:PORT of the first process.")
  DEFINE_count = functools.partial(
    flags.DEFINE_integer, lower_bound=1, upper_bound=2**31 - 1
  )
  DEFINE_count("num_processes", None, "How many processes train together.")
  flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.", 0)
  flags.DEFINE_enum(
    "distributed", None, ["auto"], "Finds these three out: on Slurm, TPU pods."
  )
  DEFINE_count("connect_seconds", 300, "How long processes wait for others.")
  DEFINE_count("heartbeat_seconds", 100, "When a silent process is lost.")
  cli.run(main, cli.on_config)
