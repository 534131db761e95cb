"""Draws samples from a trained run.

python -m sparse_transformer.sample --workdir=runs/digits --num=16

Writes them into the workdir, or the folder --out: images as samples.png, next
to real ones; other data as samples.txt, samples.fasta or samples_0.wav,
samples_1.wav, ... Text is also printed.
With --given=N, the samples start with the first N positions of sequences of the
test split; with --prompt=TEXT, with a text; with --prompt=@FILE, with the
contents of a file. With --length=N, they have N symbols, the start included, in
place of data.length. Tokens are integers in prompts and samples, with spaces
between them and a line for each sequence.
"""

import os
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from sparse_transformer import cli, data, version
from sparse_transformer.cli import flags
from sparse_transformer.data import files


def main(argv: Sequence[str]) -> None:
  """Draws sequences from a run, and writes them into files."""
  args = flags.FLAGS
  # JAX takes seconds to import; mistakes in flags are found by now.
  import jax

  from sparse_transformer.model import sampling
  from sparse_transformer.signals import Signals
  from sparse_transformer.training import kernel_check
  from sparse_transformer.training.evaluation import samples
  from sparse_transformer.training.experiment import open_run

  sampler = sampling.Sampler(args.temperature, args.top_k, args.top_p)
  run = open_run(args.workdir, cli.overrides(), args.step)
  experiment = run.experiment
  # Prompts may be read by kernels.
  kernel_check.avoid_wrong(experiment)
  source = experiment.source

  arrangement = source.arrangement
  labels = arrangement.labels(args.order)
  length = args.length or source.length
  decoder = samples.decoder(experiment, labels, length)
  prompts = _prompts(source, length, labels)
  # Only examples to complete must be the run's.
  state = run.restore(with_data=args.given > 0)
  folder = pathlib.Path(args.out or args.workdir)
  folder.mkdir(parents=True, exist_ok=True)

  with Signals() as signals, jax.set_mesh(experiment.mesh):
    tokens, seconds = sampling.sample(
      decoder,
      state.ema,
      sampler,
      prompts,
      length,
      seed=args.seed,
      check_stop=signals.check,
    )

  # Images were drawn in any order; files have rows and columns.
  paths = samples.save(
    folder,
    source,
    arrangement.restore(tokens, labels),
    step=run.step,
    command=version.command(step=run.step),
  )
  if paths[0].suffix in samples.TEXTS:
    print(samples.read_text(paths[0]), end="\n\n")
  # Nothing takes no time, if all is given.
  speed = (tokens.size - prompts.size) / (seconds or 1)
  more = " ..." if len(paths) > 1 else ""
  print(
    f"{args.num} sample{'s' * (args.num > 1)} of"
    f" {experiment.stage(run.step)} in {paths[0]}{more};"
    f" {speed:,.0f} symbols per second"
  )


def _prompts(source, length, labels):
  """The first positions of the sequences to draw.

  Args:
    source: the run's source of data.
    length: of the sequences to draw.
    labels: of the scan in which images are drawn.

  Returns:
    Integers [num, S]; S may be 0. All rows are equal with --prompt.

  Raises:
    ValueError: flags contradict each other or the data.
    OSError: the file of a prompt cannot be read.
  """
  args = flags.FLAGS
  num = args.num
  num_given = args.given
  text = args.prompt
  if num_given and text:
    raise ValueError("--given and --prompt cannot be combined; set only one")

  if text:
    prompt = _read_prompt(source, text)
    # A prompt that fills a sequence would leave nothing to draw.
    if (size := len(prompt)) >= length:
      kept = max(1, length // 2)
      prompt = prompt[-kept:]
      print(
        f"the prompt has {size:,} symbols: its last {kept:,} are used, as half"
        f" of the {length:,} of a sequence",
        file=sys.stderr,
      )
    return np.broadcast_to(prompt, (num, len(prompt)))

  from sparse_transformer.training.evaluation import samples

  empty = samples.no_prompts(source, num)
  if not num_given:
    return empty
  # Test sequences are as long as those of training, whatever --length is.
  most = min(length, source.length)
  if not 0 < num_given <= most:
    raise ValueError(
      f"--given={num_given} must lie between 1 and the {most} positions of a"
      " sequence"
    )
  real = samples.real_examples(source, num)
  # A prompt is the beginning of a row, thus the first positions of its order.
  rows = [source.arrangement.arrange(x, labels)[:num_given] for x in real]
  return np.stack(rows).astype(empty.dtype)


def _read_prompt(source, text):
  """The symbols of a prompt: of a text or, after @, of a file; integers [S].

  Raises ValueError if the data have no such prompts, or it is empty.
  """
  if not isinstance(source, data.Stream):
    raise ValueError(
      "--prompt is for text, tokens, bases and sound; to complete real images,"
      " use --given=N"
    )
  if text.startswith("@"):
    path = files.from_config(text[1:])
    content = files.read(path)
  else:
    path, content = pathlib.Path("--prompt"), os.fsencode(text)
    # Bases alone are easier to type than a file with a header.
    if source.codec.suffix == ".fasta" and text[0] != ">":
      content = b">\n" + content
    # A path would be read as a prompt of its letters.
    if os.path.exists(text):
      raise ValueError(f"--prompt={text} is a file; write --prompt=@{text}")

  # The codec puts the separator of documents at the end.
  prompt = source.codec.decode(content, path)
  if source.separator is not None:
    prompt = prompt[:-1]
  if not len(prompt):
    raise ValueError(f"{path} has 0 symbols; a prompt has at least 1")
  return prompt


if __name__ == "__main__":
  flags.DEFINE_integer("num", 16, "Number of sequences.", 1, 10**6)
  flags.DEFINE_float("temperature", 1.0, "Divides the logits; 0: the argmax.")
  flags.DEFINE_integer("top_k", 0, "Draws from the k most probable; 0: all.")
  flags.DEFINE_float("top_p", 1.0, "Draws from the likeliest that sum to it.")
  flags.DEFINE_integer("seed", 0, "Seed of the draws.", 0, 2**32 - 1)
  flags.DEFINE_string("step", None, "Checkpoint: a step, or best; or the last.")
  flags.DEFINE_integer("given", 0, "Positions to take from test sequences.")
  flags.DEFINE_string("prompt", None, "What they start with: TEXT, or @FILE.")
  flags.DEFINE_integer("length", None, "Tokens; default: data.length.", 1)
  flags.DEFINE_string("out", None, "Folder for the samples; default: workdir.")
  flags.DEFINE_list(
    "order", [], "Permutations of images: NAME=LABEL, see docs/data.md."
  )
  cli.run(main, cli.on_workdir)
