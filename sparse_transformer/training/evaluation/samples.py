"""Sequences drawn from a network, and the files that hold them."""

import dataclasses
import math
import os
import pathlib
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from sparse_transformer import atomic, data, model as model_lib
from sparse_transformer.data import files
from sparse_transformer.figures import style
from sparse_transformer.model import sampling
from sparse_transformer.training.experiment import Experiment

TEXTS = ".txt", ".fasta"  # suffixes of samples that can be printed
MAX_TEXT = 4000  # bytes of sampled text that are shown
# In pixels: the width of each half of a picture, about; the space between two
# images; that between the halves; and the height of their labels.
SHEET, BORDER, GAP, LABEL = 440, 4, 40, 32


def decoder(
  experiment: Experiment,
  labels: tuple[int, ...] = (),
  length: int | None = None,
) -> sampling.Cached | sampling.Recompute:
  """Makes the decoder that draws sequences from a network.

  It keeps keys and values. A cache holds one document only, so that networks of
  documents do without, and compute all again for each symbol.

  Args:
    experiment: the experiment whose network decodes.
    labels: of the order of an image, see `Arrangement.labels`.
    length: the most symbols of a sequence; by default as in training.

  Raises ValueError if the data have labels, or the network cannot have that
  length.
  """
  network = experiment.model
  source = experiment.source
  if isinstance(source, data.Sequences):
    raise ValueError(
      f"data.name={experiment.config.data.name} has labelled examples, and only"
      " images and streams are sampled; eval.py scores it"
    )

  # A longer sequence is drawn from the same network with another length, which
  # works unless it has learned an embedding for each position.
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

  if network.separator is None:
    return sampling.Cached(network, labels)
  return sampling.Recompute(apply, network.length, labels)


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
  # The old provenance goes first, since it must never lie beside new samples.
  stem = pathlib.Path(folder) / "samples"
  stem.with_suffix(".json").unlink(missing_ok=True)
  if isinstance(source, data.Stream):
    paths = source.codec.save(stem, tokens)
  else:
    # Labelled data, the third kind of source, are rejected by `decoder`.
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
  """Draws sampled images on the left, and real ones on the right.

  The frames of a clip are put side by side.

  Args:
    path: of the PNG file.
    tokens: the sampled images, integers [images, positions].
    real: the real images, likewise; may be none.
    source: the data, which have the shape of an image.
  """
  # About as many images across as down, in pixels, enlarged if they are small.
  frames = source.frames
  rows = source.shape[0] // frames
  columns = source.shape[1] * frames
  across = math.ceil(math.sqrt(len(tokens) * rows / columns))
  down = -(-len(tokens) // across)
  scale = max(1, SHEET // (across * columns))
  # Each image has a frame of one pixel.
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
  """Images as uint8 [images, rows, columns, channels], frames side by side."""
  height, columns, channels = source.shape
  frames = source.frames
  rows = height // frames

  # Symbols are levels at equal distances, from black to white.
  shades = symbols * 255.0 / (source.vocab_size - 1)
  pixels = shades.round().astype(np.uint8)

  # The data have frames below each other, pictures beside each other.
  clips = pixels.reshape(-1, frames, rows, columns, channels)
  beside = clips.swapaxes(1, 2)
  return beside.reshape(-1, rows, frames * columns, channels)


def no_prompts(source: data.Source, num: int) -> np.ndarray:
  """Empty prompts [num, 0], in the smallest dtype that holds all symbols."""
  return np.zeros((num, 0), np.min_scalar_type(source.vocab_size - 1))


def real_examples(source: data.Source, num: int) -> np.ndarray:
  """Reads test examples to compare samples with, integers [num, length].

  They are the first images, again from the start if there are too few, or
  windows that are spread evenly over a stream.
  """
  examples = source.examples("test")
  if isinstance(source, data.Images):
    places = np.arange(num) % len(examples)
  else:
    places = np.arange(num) * len(examples) // num
  return np.stack([examples[int(i)] for i in places])


def read_text(path: pathlib.Path) -> str:
  """Reads the beginning of a file of samples.

  Control characters are replaced: a network may draw any byte, and some would
  change how a terminal behaves.
  """
  with path.open("rb") as file:
    text = file.read(MAX_TEXT).decode(errors="replace")
  shown = (c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
  return "".join(shown)
