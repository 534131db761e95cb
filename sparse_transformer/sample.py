"""Samples from a run.

python -m sparse_transformer.sample --workdir=runs/digits --num=16

Writes into the workdir samples.png, sampled images beside real ones, or
samples.txt, samples.fasta, samples_0.wav ... for a source of these. Sequences
begin as real ones of the test split do with --given=N, their first N
positions, or as a file does with --prompt=FILE.
"""

import pathlib

import numpy as np
from absl import flags

from sparse_transformer import cli, data
from sparse_transformer.data import files
from sparse_transformer.figures import plots
from sparse_transformer.model import kv_cache as cache, sampling
from sparse_transformer.training import checkpoint, signals as signals_lib
from sparse_transformer.training.experiment import Experiment


def sample(experiment, params, *, num, prompts, cached=True, **options):
  """Draws sequences: (uint8 [num, length], symbols per second)."""
  length = experiment.source.length
  decoder = (
    cache.Decoder(experiment.model)
    if cached
    else sampling.Recompute(experiment.apply, length)
  )
  tokens, seconds = sampling.sample(
    decoder,
    params,
    num=num,
    length=length,
    prompts=prompts,
    name="sampling",
    **options,
  )
  drawn = num * (length - prompts.shape[1])
  return tokens, drawn / seconds if drawn else 0.0


def make_prompts(source, num, given=0, path=None):
  """The first positions of `num` sequences: uint8 [num, S]."""
  if given and path:
    raise ValueError("--given and --prompt exclude each other")
  if path:
    prompt = read_prompt(source, path)
    return np.broadcast_to(prompt, (num, len(prompt)))
  if not given:
    return np.zeros((num, 0), np.uint8)
  if not 0 < given <= source.length:
    raise ValueError(
      f"--given={given} must lie between 1 and the {source.length} positions"
      " of a sequence"
    )
  return real_examples(source, num)[:, :given]


def read_prompt(source, path):
  """The symbols of a file, at most as many as a sequence has."""
  if not isinstance(source, data.Stream):
    raise ValueError(
      "--prompt is for text, bases and sound; images begin with --given=N"
      " positions of real ones"
    )
  path = pathlib.Path(path)
  prompt = source.codec.decode(files.read(path), path)
  if not 0 < len(prompt) <= source.length:
    raise ValueError(
      f"{path} has {len(prompt):,} symbols; a prompt has between 1 and the"
      f" {source.length:,} of a sequence"
    )
  return prompt


def real_examples(source, num):
  """Sequences of the test split, from all of it: uint8 [num, length]."""
  examples = source.examples("test")
  if isinstance(source, data.Images):
    places = np.arange(num) % len(examples)
  else:
    places = np.arange(num) * len(examples) // num
  return np.stack([examples[int(i)] for i in places])


def save(folder, source, tokens):
  """Writes the sequences into files: the paths."""
  stem = pathlib.Path(folder) / "samples"
  if isinstance(source, data.Stream):
    return source.codec.save(stem, tokens)
  path = stem.with_suffix(".png")
  real = real_examples(source, len(tokens))
  plots.save_images(path, tokens, real, source.shape, source.vocab_size)
  return [path]


def main(argv):
  cli.check_arguments(argv)
  args = flags.FLAGS
  if args.num < 1:
    raise ValueError(f"--num={args.num} must be at least 1")
  options = dict(
    temperature=args.temperature, top_k=args.top_k, top_p=args.top_p
  )
  sampling.check(**options)
  experiment = Experiment(args.config)
  source = experiment.source
  prompts = make_prompts(source, args.num, args.given, args.prompt)
  with (
    signals_lib.Signals() as signals,
    checkpoint.Checkpoints(args.workdir) as checkpoints,
  ):
    state = experiment.restore(checkpoints, args.step)
    tokens, rate = sample(
      experiment,
      state.ema,
      num=args.num,
      prompts=prompts,
      cached=args.cache,
      seed=args.seed,
      check_stop=signals.check,
      **options,
    )
  paths = save(args.workdir, source, tokens)
  more = " ..." if len(paths) > 1 else ""
  print(
    f"{args.num} samples of step {int(state.step)} in {paths[0]}{more};"
    f" {rate:,.0f} symbols per second"
  )


if __name__ == "__main__":
  flags.DEFINE_integer("num", 16, "Sequences to draw.")
  flags.DEFINE_float("temperature", 1.0, "Divides the logits; 0: the best.")
  flags.DEFINE_integer("top_k", 0, "Only the k most probable; 0: all.")
  flags.DEFINE_float("top_p", 1.0, "Only the most probable, to this sum.")
  flags.DEFINE_integer("seed", 0, "Of the draws.")
  flags.DEFINE_integer("step", None, "Of the checkpoint; the last by default.")
  flags.DEFINE_integer("given", 0, "Positions taken from test sequences.")
  flags.DEFINE_string("prompt", None, "File that the sequences begin with.")
  flags.DEFINE_bool("cache", True, "Keeps keys and values; else recomputes.")
  cli.run_on_workdir(main)
