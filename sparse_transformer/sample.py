"""Draws samples from a trained run.

python -m sparse_transformer.sample --workdir=runs/digits --num=16

Writes the samples into the workdir, or into the folder --out. Images are
written to samples.png, next to real images; other data are written to
samples.txt, samples.fasta, or samples_0.wav, samples_1.wav and so on. Text is
also printed.

With --given=N, each sample starts with the first N positions of a sequence from
the test split. With --prompt=TEXT, samples start with this text; with
--prompt=@FILE, they start with the contents of this file. With --length=N, each
sample has N symbols, including the prompt, instead of data.length. Tokens are
read and written as integers separated by spaces, one sequence per line.
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
  """Draws sequences from a run, and writes them to files."""
  args = flags.FLAGS
  # Importing JAX takes seconds, so mistakes in flags are reported before it.
  import jax

  from sparse_transformer.model import sampling
  from sparse_transformer.signals import Signals
  from sparse_transformer.training import kernel_check
  from sparse_transformer.training.evaluation import samples
  from sparse_transformer.training.experiment import open_run

  sampler = sampling.Sampler(args.temperature, args.top_k, args.top_p)
  run = open_run(args.workdir, cli.overrides(), args.step)
  experiment = run.experiment
  # Attention over a prompt may run in a kernel.
  kernel_check.avoid_wrong(experiment)
  source = experiment.source

  arrangement = source.arrangement
  labels = arrangement.labels(args.order)
  length = args.length or source.length
  decoder = samples.decoder(experiment, labels, length)
  prompts = _prompts(source, length, labels)
  # Only --given reads examples, which must then be those of the run's data.
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

  # Images may be drawn in any order, so restore rows and columns first.
  paths = samples.save(
    folder,
    source,
    arrangement.restore(tokens, labels),
    step=run.step,
    command=version.command(step=run.step),
  )
  if paths[0].suffix in samples.TEXTS:
    print(samples.read_text(paths[0]), end="\n\n")
  # If the prompts fill the sequences, nothing is drawn, in 0 seconds.
  speed = (tokens.size - prompts.size) / (seconds or 1)
  more = " ..." if len(paths) > 1 else ""
  print(
    f"{args.num} sample{'s' * (args.num > 1)} of"
    f" {experiment.stage(run.step)} in {paths[0]}{more};"
    f" {speed:,.0f} symbols per second"
  )


def _prompts(source, length, labels):
  """Returns the first positions of the sequences to draw.

  Args:
    source: the run's source of data.
    length: the length of the sequences to draw.
    labels: the labels of the scan order in which images are drawn.

  Returns:
    Integers [num, S]; S may be 0. With --prompt, all rows are equal.

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
        f"the prompt has {size:,} symbols, which leaves no room in a sequence"
        f" of {length:,}; only its last {kept:,} symbols are used",
        file=sys.stderr,
      )
    return np.broadcast_to(prompt, (num, len(prompt)))

  from sparse_transformer.training.evaluation import samples

  empty = samples.no_prompts(source, num)
  if not num_given:
    return empty
  # Test sequences have the length used in training, regardless of --length.
  most = min(length, source.length)
  if not 0 < num_given <= most:
    raise ValueError(
      f"--given={num_given} must lie between 1 and the {most} positions of a"
      " sequence"
    )
  real = samples.real_examples(source, num)
  # Arrange the images first, because a prompt is the first positions in the
  # chosen order, not in row order.
  rows = [source.arrangement.arrange(x, labels)[:num_given] for x in real]
  return np.stack(rows).astype(empty.dtype)


def _read_prompt(source, text):
  """Returns the symbols of a prompt, integers [S].

  Args:
    source: the run's source of data.
    text: the prompt, or @ followed by the path of a file.

  Raises:
    ValueError: the data are not text-like, or the prompt is empty.
    OSError: the file cannot be read.
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
    # Allow bases without the header line that a FASTA file requires.
    if source.codec.suffix == ".fasta" and text[0] != ">":
      content = b">\n" + content
    # Otherwise, the letters of the path would be the prompt.
    if os.path.exists(text):
      raise ValueError(f"--prompt={text} is a file; write --prompt=@{text}")

  # The codec appends the separator of documents; a prompt must not end with it.
  prompt = source.codec.decode(content, path)
  if source.separator is not None:
    prompt = prompt[:-1]
  if not len(prompt):
    raise ValueError(f"{path} has 0 symbols; a prompt needs at least 1")
  return prompt


if __name__ == "__main__":
  flags.DEFINE_integer("num", 16, "Number of sequences to draw.", 1, 10**6)
  flags.DEFINE_float(
    "temperature",
    1.0,
    "Divides the logits; 0 always chooses the most probable symbol.",
  )
  flags.DEFINE_integer(
    "top_k", 0, "Draws from the k most probable symbols; 0: from all."
  )
  flags.DEFINE_float(
    "top_p",
    1.0,
    "Draws from the fewest most probable symbols whose probabilities sum to at"
    " least this.",
  )
  flags.DEFINE_integer("seed", 0, "Seed of the draws.", 0, 2**32 - 1)
  flags.DEFINE_string(
    "step", None, "Checkpoint to read: a step, or best; default: the last."
  )
  flags.DEFINE_integer(
    "given", 0, "Number of positions copied from each test sequence."
  )
  flags.DEFINE_string("prompt", None, "Start of every sequence: TEXT or @FILE.")
  flags.DEFINE_integer(
    "length", None, "Symbols per sequence; default: data.length.", 1
  )
  flags.DEFINE_string("out", None, "Folder for the samples; default: workdir.")
  flags.DEFINE_list(
    "order",
    [],
    "Order in which images are drawn, as NAME=LABEL; see docs/data.md.",
  )
  cli.run(main, cli.on_workdir)
