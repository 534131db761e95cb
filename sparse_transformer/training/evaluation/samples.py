"""Sequences drawn from a network, and the files that hold them."""

import dataclasses
import math
import os
import pathlib
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from sparse_transformer import atomic, data, model as model_lib
from sparse_transformer.data import files
from sparse_transformer.figures import style
from sparse_transformer.model import sampling
from sparse_transformer.training.distributed import processes
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.step import State

TEXTS = ".txt", ".fasta"  # suffixes of samples that can be printed
MAX_TEXT = 4000  # bytes of sampled text that are shown
# Pixels: the width of images side by side, and the space between two, between
# the halves of a picture, and for their labels.
SHEET, BORDER, GAP, LABEL = 440, 4, 40, 32


def decoder(
  experiment: Experiment,
  cached: bool = True,
  labels: tuple[int, ...] = (),
  length: int | None = None,
) -> sampling.Cached | sampling.Recompute:
  """The decoder of sequences.

  Args:
    experiment: whose network decodes.
    cached: whether keys and values are kept; else all is computed again for
      each symbol. A cache can hold one document only.
    labels: of the order of an image, see `data.Scans.labels`.
    length: symbols of a sequence at the most; by default as in training.

  Raises ValueError if there are several processes, the data have labels, or the
  network cannot have that length.
  """
  network = experiment.model
  source = experiment.source
  if isinstance(source, data.Sequences):
    raise ValueError(
      f"data.name={experiment.config.data.name} has labelled examples, and only"
      " images and streams are sampled; eval.py scores it"
    )
  if processes.are_several():
    raise ValueError(
      "eval.samples must be 0 with several processes; sample after training"
    )

  apply = experiment.apply
  trained = network.length
  length = length or trained
  if length != trained and isinstance(source, data.Images):
    raise ValueError(
      f"--length={length} is for text, tokens, bases and sound: images have"
      f" {trained} positions"
    )
  if length > trained:
    if network.axes:
      raise ValueError(
        f"--length={length} must be at most {trained}, the number of positions"
        " that the network has learned; with model.positions=rotary, there is"
        " no limit"
      )
    network = dataclasses.replace(network, length=length)
    apply = model_lib.make_apply(network)

  if cached and network.separator is None:
    return sampling.Cached(network, labels)
  return sampling.Recompute(apply, network.length, labels)


def draw_in_training(
  experiment: Experiment,
  state: State,
  folder: pathlib.Path,
  check_stop: Callable[[], None],
) -> str | pathlib.Path:
  """Draws `eval.samples` sequences, and writes them into a folder.

  Args:
    experiment: the run's.
    state: whose averaged weights draw. The random numbers are the same at all
      steps, so that pictures of two steps can be compared.
    folder: the workdir.
    check_stop: called after each symbol; may raise an exception.

  Returns what TensorBoard can show: a text, or the path of a picture.
  """
  config = experiment.config
  source = experiment.source
  tokens, _ = sampling.sample(
    decoder(experiment),
    state.ema,
    sampling.Sampler(),
    no_prompts(source, config.eval.samples),
    source.length,
    seed=config.train.seed,
    check_stop=check_stop,
  )
  path = save(folder, source, tokens, step=int(state.step))[0]

  # TensorBoard shows Markdown: text is indented, which makes it code.
  if path.suffix in TEXTS:
    return textwrap.indent(read_text(path), "    ", lambda line: True)
  return path if path.suffix == ".png" else f"{len(tokens)} files like {path}"


def save(
  folder: str | os.PathLike,
  source: data.Source,
  tokens: np.ndarray,
  **provenance: Any,
) -> list[pathlib.Path]:
  """Writes sequences into files, whose kind depends on the data.

  Args:
    folder: for the files, samples.* in it.
    source: the data.
    tokens: the sequences, integers [num, length].
    **provenance: what made them, as JSON, which is written beside them.

  Returns the paths of the files.
  """
  # What it says must not be of other samples, even for a moment.
  stem = pathlib.Path(folder) / "samples"
  stem.with_suffix(".json").unlink(missing_ok=True)
  if isinstance(source, data.Stream):
    paths = source.codec.save(stem, tokens)
  else:
    # `decoder` rejects labelled data.
    assert isinstance(source, data.Images)
    paths = [stem.with_suffix(".png")]
    real = tokens[:0]
    try:
      real = real_examples(source, len(tokens))
    except (FileNotFoundError, ModuleNotFoundError) as error:
      files.warn(f"no real images are beside the samples: {error}")
    save_images(paths[0], tokens, real, source)
  atomic.write_json(stem.with_suffix(".json"), provenance)
  return paths


def save_images(
  path: pathlib.Path, tokens: np.ndarray, real: np.ndarray, source: data.Images
) -> None:
  """Writes a PNG file with sampled images on the left, real ones on the right.

  There may be no real ones. Both are uint8 [images, positions]. The frames of a
  clip are put side by side.
  """
  # About as many images across as down, in pixels, enlarged if they are small.
  frames = source.frames
  rows = source.shape[0] // frames
  columns = source.shape[1] * frames
  across = math.ceil(math.sqrt(len(tokens) * rows / columns))
  down = -(-len(tokens) // across)
  scale = max(1, SHEET // (across * columns))
  width = scale * columns + 2 + BORDER
  height = scale * rows + 2 + BORDER

  halves = [("sampled", tokens)]
  if len(real):
    halves.append(("real", real))
  half_width = across * width + GAP
  page = Image.new(
    "RGB",
    (len(halves) * half_width - GAP, down * height + LABEL),
    "white",
  )
  draw = ImageDraw.Draw(page)
  font = ImageFont.load_default(LABEL * 0.7)
  for half, (label, symbols) in enumerate(halves):
    left = half * half_width
    draw.text((left, 0), label, style.GRAY, font)
    for i, pixels in enumerate(_pixels(symbols, source)):
      # Gray images have three equal channels.
      image = Image.fromarray(np.broadcast_to(pixels, (rows, columns, 3)))
      image = image.resize(
        (scale * columns, scale * rows), Image.Resampling.NEAREST
      )
      framed = ImageOps.expand(image, 1, style.GRAY)
      x = left + i % across * width
      y = LABEL + i // across * height
      page.paste(framed, (x, y))
  with atomic.writing(path) as new:
    page.save(new, format="PNG")


def _pixels(symbols, source):
  """Images uint8 [images, rows, columns, channels], frames side by side."""
  height, columns, channels = source.shape
  frames = source.frames
  rows = height // frames
  shades = symbols * 255.0 / (source.vocab_size - 1)
  clips = shades.round().astype(np.uint8)
  clips = clips.reshape(-1, frames, rows, columns, channels)
  return clips.swapaxes(1, 2).reshape(-1, rows, frames * columns, channels)


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
  shown = (c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
  return "".join(shown)
