"""Sequences drawn from a network, and the files that hold them."""

import os
import pathlib
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np

from sparse_transformer import data
from sparse_transformer.figures.image_grid import save_images
from sparse_transformer.model import sampling
from sparse_transformer.training.distributed import processes
from sparse_transformer.training.experiment import Experiment

MAX_TEXT = 4000  # bytes of sampled text that are shown


def decoder(
  experiment: Experiment, cached: bool = True
) -> sampling.Cached | sampling.Recompute:
  """The decoder of sequences; a cache can hold one document only.

  Raises:
    ValueError: there are several processes, or the data have labels.
  """
  if isinstance(experiment.source, data.Sequences):
    raise ValueError(
      f"data.name={experiment.config.data.name} has labelled examples, and only"
      " images and streams are sampled; eval.py scores it"
    )
  if processes.are_several():
    raise ValueError(
      "eval.samples must be 0 with several processes; sample after training"
    )
  model = experiment.model
  if cached and model.separator is None:
    return sampling.Cached(model)
  return sampling.Recompute(experiment.apply, model.length)


def draw_in_training(
  experiment: Experiment,
  params: Any,
  folder: pathlib.Path,
  check_stop: Callable[[], None],
) -> str | pathlib.Path:
  """Writes `eval.samples` sequences; returns a text, or the path of a picture.

  The random numbers are the same at all steps; `check_stop` may raise.
  """
  config, source = experiment.config, experiment.source
  tokens, _ = sampling.sample(
    decoder(experiment),
    params,
    sampling.Sampler(),
    no_prompts(source, config.eval.samples),
    source.length,
    seed=config.train.seed,
    check_stop=check_stop,
  )
  path, *_ = save(folder, source, tokens)
  if path.suffix in (".txt", ".fasta"):  # as code, so that it is no Markdown
    return textwrap.indent(read_text(path), "    ", lambda line: True)
  return path if path.suffix == ".png" else f"{len(tokens)} files like {path}"


def save(
  folder: str | os.PathLike, source: data.Source, tokens: np.ndarray
) -> list[pathlib.Path]:
  """Writes sequences [num, length] into files; returns their paths."""
  stem = pathlib.Path(folder) / "samples"
  if isinstance(source, data.Stream):
    return source.codec.save(stem, tokens)
  path = stem.with_suffix(".png")
  real = real_examples(source, len(tokens))
  save_images(path, tokens, real, source.shape, source.vocab_size)
  return [path]


def no_prompts(source: data.Source, num: int) -> np.ndarray:
  """Prompts of no positions, of a dtype for all symbols."""
  return np.zeros((num, 0), np.min_scalar_type(source.vocab_size - 1))


def real_examples(source: data.Source, num: int) -> np.ndarray:
  """The first test images, or windows spread over the split, [num, length]."""
  examples = source.examples("test")
  if isinstance(source, data.Images):
    places = np.arange(num) % len(examples)
  else:
    places = np.arange(num) * len(examples) // num
  return np.stack([examples[int(i)] for i in places])


def read_text(path: pathlib.Path) -> str:
  """The beginning of a file of samples, without control characters."""
  with path.open("rb") as file:
    text = file.read(MAX_TEXT).decode(errors="replace")
  return "".join(
    c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text
  )
