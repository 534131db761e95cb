"""Sequences drawn from a network, and the files that hold them."""

import os
import pathlib
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from sparse_transformer import data
from sparse_transformer.figures.image_grid import save_images
from sparse_transformer.model import kv_cache, sampling
from sparse_transformer.training.analysis import memory_limits
from sparse_transformer.training.distributed import processes
from sparse_transformer.training.experiment import Experiment

MAX_TEXT = 4000  # bytes of sampled text that are shown


def decoder(
  experiment: Experiment, num: int, name: str, cached: bool = True
) -> sampling.Decoder:
  """Makes the decoder of a network, with a key-value cache or without.

  Raises:
    ValueError: `num` sequences at a time, which `name` sets, need more memory
      than there is.
  """
  model, cache = experiment.model, kv_cache.Decoder(experiment.model)
  memory_limits.check_inference(
    experiment.config,
    experiment.source,
    num,
    name=name,
    cache=cache.num_bytes(1) if cached else None,
  )
  return cache if cached else sampling.Recompute(experiment.apply, model.length)


def check(experiment: Experiment) -> sampling.Decoder | None:
  """Returns the decoder of samples during training, if `config.eval` has them.

  Raises:
    ValueError: they need more memory than there is, or a single process.
  """
  num = experiment.config.eval.samples
  if num and processes.are_several():
    raise ValueError(
      f"eval.samples={num} must be 0 with several processes; sample from the"
      " run after training"
    )
  # The cache holds a single document.
  cached = experiment.model.separator is None
  return decoder(experiment, num, "eval.samples", cached) if num else None


def draw(
  experiment: Experiment,
  params: Any,
  folder: pathlib.Path,
  check_stop: Callable[[], None],
) -> list[pathlib.Path]:
  """Draws the samples of `config.eval`; returns the paths of their files.

  The draws are the same for all steps. `check_stop` is called about once a
  second; may raise an exception.
  """
  config, source = experiment.config, experiment.source
  tokens, _ = sampling.sample(
    cast(sampling.Decoder, check(experiment)),
    params,
    sampling.Sampler(),
    num=config.eval.samples,
    length=source.length,
    seed=config.train.seed,
    name="sampling",
    check_stop=check_stop,
  )
  return save(folder, source, tokens)


def save(
  folder: str | os.PathLike, source: data.Source, tokens: np.ndarray
) -> list[pathlib.Path]:
  """Writes sequences uint8 [num, length] into files; returns their paths."""
  stem = pathlib.Path(folder) / "samples"
  if isinstance(source, data.Stream):
    return source.codec.save(stem, tokens)
  path = stem.with_suffix(".png")
  real = real_examples(source, len(tokens))
  save_images(path, tokens, real, source.shape, source.vocab_size)
  return [path]


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
