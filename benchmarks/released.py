"""Measures networks of the released sizes with random weights.

python -m benchmarks.released --workdir=RUN --converted=RUN --examples=20

--workdir names a run of the 15M network on images, and --converted a run of the
152M network that `convert` has just made, whose peak memory is recorded. Test
images are scored as by eval.py. Two of them are also scored with float16
activations between blocks, as in the released code on GPUs.
"""

import sys
from collections.abc import Sequence
from unittest import mock

import jax
import numpy as np
from absl import flags

from benchmarks import record
from sparse_transformer import cli, model as model_lib
from sparse_transformer.model import transformer
from sparse_transformer.training import costs, metrics
from sparse_transformer.training.experiment import open_run

BATCH = 2


def main(argv: Sequence[str]) -> None:
  args = flags.FLAGS
  run = open_run(args.workdir, {"model.dtype": "float32"})
  experiment, params = run.experiment, run.restore().ema
  rows = experiment.source.examples("test")
  starts = range(0, args.examples, BATCH)
  batches = [np.stack([rows[i + j] for j in range(BATCH)]) for i in starts]
  jax.block_until_ready(experiment.losses(params, batches[0]))  # compiles
  began = {name: clock() for name, clock in metrics.TIMES.items()}
  mean = lambda losses, x: np.asarray(losses(params, x), np.float64).mean()
  nats = [mean(experiment.losses, x) for x in batches]
  spent = {name: metrics.TIMES[name]() - began[name] for name in began}
  plain = transformer.sharding.split_stream
  rounded = lambda x: plain(x.astype("float16").astype("float32"))
  with mock.patch.object(transformer.sharding, "split_stream", rounded):
    half = open_run(args.workdir, {"model.dtype": "float16"}).experiment
    error = mean(half.losses, batches[0]) - nats[0]
  large = open_run(args.converted).experiment.model
  flops = costs.flops_per_token(experiment.model)["total"] / 3  # forward
  content = record.about("python -m benchmarks.released", sys.argv[1:]) | dict(
    parameters=model_lib.count_parameters(experiment.model),
    images=args.examples,
    **spent,
    flops_per_image=flops * experiment.model.length,
    bits=float(np.mean(nats) / np.log(2)),
    float16_bits=float(error / np.log(2)),
    converted=model_lib.count_parameters(large),
    peak_bytes=metrics.read(args.converted)[-1]["peak_bytes"],
  )
  record.write(record.path("released"), content)


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Run of a converted 15M network.")
  flags.DEFINE_string("converted", None, "Run of a converted 152M network.")
  flags.DEFINE_integer("examples", 20, "Number of test images, even.")
  cli.run(main)
