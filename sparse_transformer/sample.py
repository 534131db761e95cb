"""Draws samples from a trained run.

python -m sparse_transformer.sample --workdir=runs/digits --num=16

Writes them into the workdir: images as samples.png, next to real ones; other
data as samples.txt, samples.fasta or samples_0.wav, samples_1.wav, ...
With --given=N, the samples start with the first N positions of sequences of the
test split; with --prompt=FILE, with the contents of a file. Tokens are integers
in both files, with spaces between them and a line for each sequence.
"""

import pathlib
from collections.abc import Sequence

import numpy as np

from sparse_transformer import cli, data, version
from sparse_transformer.cli import flags
from sparse_transformer.data import files


def main(argv: Sequence[str]) -> None:
  args = flags.FLAGS
  step = cli.parse_step(args.step)
  import jax

  from sparse_transformer.model import sampling
  from sparse_transformer.signals import Signals
  from sparse_transformer.training.distributed import mesh
  from sparse_transformer.training.evaluation import samples
  from sparse_transformer.training.experiment import open_run, restore

  sampler = sampling.Sampler(args.temperature, args.top_k, args.top_p)
  run = experiment, _ = open_run(args.workdir, cli.overrides(), step)
  source, decoder = experiment.source, samples.decoder(experiment, args.cache)
  prompts = _prompts(source, args.num, args.given, args.prompt)
  mesh.check_network(experiment.model, experiment.mesh.shape)
  state = restore(*run, step, with_data=args.given > 0)
  with Signals() as signals, jax.set_mesh(experiment.mesh):
    tokens, seconds = sampling.sample(
      decoder,
      state.ema,
      sampler,
      prompts,
      source.length,
      seed=args.seed,
      check_stop=signals.check,
    )
  step = int(state.step)
  about = dict(step=step, command=version.command(step=step))
  paths = samples.save(args.workdir, source, tokens, **about)
  drawn = tokens.size - prompts.size
  more = " ..." if len(paths) > 1 else ""
  print(
    f"{args.num} samples of step {step} in {paths[0]}{more};"
    f" {drawn / seconds if drawn else 0:,.0f} symbols per second"
  )


def _prompts(source, num, given, path):
  """The first positions of the sequences to draw, [num, S]; S may be 0."""
  if given and path:
    raise ValueError("--given and --prompt cannot be combined; set only one")
  if path:
    prompt = _read_prompt(source, pathlib.Path(path))
    return np.broadcast_to(prompt, (num, len(prompt)))
  from sparse_transformer.training.evaluation import samples

  if not given:
    return samples.no_prompts(source, num)
  if not 0 < given <= source.length:
    raise ValueError(
      f"--given={given} must lie between 1 and the {source.length} positions"
      " of a sequence"
    )
  return samples.real_examples(source, num)[:, :given]


def _read_prompt(source, path):
  """The symbols of a file, at most as many as a sequence has."""
  if not isinstance(source, data.Stream):
    raise ValueError(
      "--prompt is for text, tokens, bases and sound; to complete real images,"
      " use --given=N"
    )
  prompt = source.codec.decode(files.read(path), path)
  if not 0 < len(prompt) <= source.length:
    raise ValueError(
      f"{path} has {len(prompt):,} symbols; a prompt has between 1 and"
      f" {source.length:,}, the length of a sequence"
    )
  return prompt


if __name__ == "__main__":
  flags.DEFINE_integer(
    "num", 16, "Number of sequences.", lower_bound=1, upper_bound=10**6
  )
  flags.DEFINE_float("temperature", 1.0, "Divides the logits; 0: the argmax.")
  flags.DEFINE_integer("top_k", 0, "Draws from the k most probable; 0: all.")
  flags.DEFINE_float(
    "top_p", 1.0, "Draws from the likeliest that add up to it."
  )
  flags.DEFINE_integer(
    "seed", 0, "Seed of the draws.", lower_bound=0, upper_bound=2**32 - 1
  )
  flags.DEFINE_string("step", None, "Checkpoint: a step, or best; or the last.")
  flags.DEFINE_integer("given", 0, "Positions to take from test sequences.")
  flags.DEFINE_string("prompt", None, "File that the sequences start with.")
  flags.DEFINE_bool("cache", True, "Caches keys and values, else recomputes.")
  cli.run(main, cli.on_workdir)
