"""Samples from a run.

python -m sparse_transformer.sample --workdir=runs/digits --num=16

Writes samples.png into the workdir, sampled images beside real ones, or
samples.txt for a source of text.
"""

import pathlib

import numpy as np
from absl import flags

from sparse_transformer import checkpoint, command, plots, sampling
from sparse_transformer.experiment import Experiment


def main(argv):
  command.check_arguments(argv)
  args = flags.FLAGS
  experiment = Experiment(args.config)
  source = experiment.source
  with checkpoint.Checkpoints(args.workdir) as checkpoints:
    state = experiment.restore(checkpoints, args.step)
  tokens = np.asarray(
    sampling.sample(
      experiment.apply,
      state.ema,
      num=args.num,
      length=source.length,
      temperature=args.temperature,
      seed=args.seed,
    )
  )
  folder = pathlib.Path(args.workdir)
  if source.unit == "bits/dim":
    path, real = folder / "samples.png", source.examples("test")
    real = np.stack([real[i] for i in range(min(args.num, len(real)))])
    plots.save_images(path, tokens, real, source.shape, source.vocab_size)
  else:
    path = folder / "samples.txt"
    path.write_bytes(b"\n\n".join(map(bytes, tokens)))
  print(f"{args.num} samples of step {int(state.step)} in {path}")


if __name__ == "__main__":
  flags.DEFINE_integer("num", 16, "Sequences to draw.")
  flags.DEFINE_float("temperature", 1.0, "Divides the logits; 0: the best.")
  flags.DEFINE_integer("seed", 0, "Of the draws.")
  flags.DEFINE_integer("step", None, "Of the checkpoint; the last by default.")
  command.run_on_workdir(main)
