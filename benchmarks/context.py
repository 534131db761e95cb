"""Scores the same symbols with more and less context, for several runs.

python -m benchmarks.context --workdirs=runs/dense,runs/strided \\
  --min_context=0,256,1024,2048 --out=runs/context.json

In a window, later positions have more context, but also other content. Here
every run scores the same symbols at each minimum context: --symbols of them,
from the first that has the largest minimum context before it. Differences to
the first --min_context are paired, symbol by symbol; their errors, and those of
the bits, are over blocks of 4,096 symbols. For the docs, the record is
benchmarks/results/context.json, longer_context.json or genome_context.json.
"""

import math
import pathlib
import sys
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from benchmarks import record
from benchmarks.markov import mean_and_error
from sparse_transformer import cli, config as config_lib, data
from sparse_transformer.training.checkpoints import store
from sparse_transformer.training.evaluation import scoring
from sparse_transformer.training.experiment import Experiment

BLOCK = 4_096  # symbols; longer ones would be few


def main(argv: Sequence[str]) -> None:
  cli.check_arguments(argv)
  args = flags.FLAGS
  if not (args.workdirs and args.out):
    raise ValueError("--workdirs and --out must be set; see --help")
  try:
    contexts = [int(word) for word in args.min_context]
  except ValueError:
    raise ValueError("--min_context must be integers") from None
  runs = []
  for workdir in args.workdirs:
    runs.append(score_run(workdir, args.split, contexts, args.symbols))
    if runs[-1]["crc32"] != runs[0]["crc32"]:
      raise ValueError(
        f"{workdir} and {args.workdirs[0]} have different data; name runs whose"
        " bits can be compared"
      )
    for row in runs[-1]["contexts"]:
      print(workdir, "{min_context}: {bits:.4f}".format(**row), flush=True)
  if len({run["pattern"] for run in runs}) == len(runs):
    runs = [run | {"run": run["pattern"]} for run in runs]
  content = record.about("python -m benchmarks.context", sys.argv[1:])
  content |= dict(split=args.split, symbols=args.symbols, block=BLOCK)
  content |= dict(runs=runs)
  record.write(pathlib.Path(args.out), content)


def score_run(
  workdir: str, split: str, contexts: Sequence[int], number: int
) -> dict[str, Any]:
  """Bits of `number` symbols of a split with each minimum context."""
  config = config_lib.in_float32(config_lib.read_config(workdir))
  experiment = Experiment(config)
  source = experiment.source
  if not isinstance(source, data.Stream):
    raise ValueError(f"{workdir} models images, which have no more context")
  for context in contexts:  # finds errors before the work starts
    source.windows(split, context)
  first = max(contexts)
  if first + number > (size := len(source.load()[split])):
    raise ValueError(
      f"{split} has {size} symbols, fewer than {first + number}: the largest"
      " minimum context and --symbols; use smaller ones"
    )
  with store.Checkpoints(workdir) as checkpoints:
    state = checkpoints.restore(experiment.like)
  places, rows, least = range(first, first + number), [], None
  for context in contexts:
    bits = bits_of(experiment, state.ema, split, context, places)
    least = bits if least is None else least
    mean, error = mean_and_error(bits, BLOCK)
    less, its_error = mean_and_error(bits - least, BLOCK)
    row = dict(min_context=context, bits=mean, standard_error=error)
    rows.append(row | dict(difference=less, difference_error=its_error))
  return dict(
    run=str(pathlib.Path(*pathlib.Path(workdir).parts[-2:])),
    pattern=config.attention.pattern,
    length=source.length,
    step=int(state.step),
    unit=source.unit,
    crc32=source.digest()["crc32"],
    contexts=rows,
  )


def bits_of(
  experiment: Experiment, params, split: str, min_context: int, places: range
) -> np.ndarray:
  """Bits of the symbols at consecutive places of a split, float64."""
  windows = experiment.source.windows(split, min_context)
  # Every window scores its last `step` positions, the first one all.
  step = experiment.source.length - min_context
  start = (places.start - min_context) // step
  stop = -(-(places.stop - min_context) // step)
  nats: list[np.ndarray] = []
  add = lambda nats_BL, scored_BL: nats.append(nats_BL[scored_BL])
  scoring.bits_per_dim(
    experiment.losses,
    params,
    data.Lazy(stop - start, lambda i: windows[start + i]),
    batch_size=experiment.config.eval.batch_size,
    sharding=experiment.batch_sharding,
    tally=types.SimpleNamespace(add=add, summary=dict),
  )
  bits = np.concatenate(nats).astype(np.float64) / math.log(2)
  first = start * step + min_context if start else 0
  return bits[places.start - first : places.stop - first]


if __name__ == "__main__":
  flags.DEFINE_list("workdirs", [], "Folders of runs on the same data.")
  flags.DEFINE_list(
    "min_context", ["0", "256", "1024", "2048"], "Minimum contexts to compare."
  )
  flags.DEFINE_integer("symbols", 65_536, "How many are scored.", lower_bound=1)
  flags.DEFINE_enum("split", "test", data.SPLITS, "Split to score.")
  flags.DEFINE_string("out", None, "File of the record.")
  cli.run(main)
