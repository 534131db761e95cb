"""Sequences drawn from a network, and the files to which they are written."""

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
# In pixels: the approximate width of each half of a picture, the space between
# images, the space between the halves, and the height of their labels.
SHEET, BORDER, GAP, LABEL = 440, 4, 40, 32


def decoder(
  experiment: Experiment,
  labels: tuple[int, ...] = (),
  length: int | None = None,
) -> sampling.Cached | sampling.Recompute:
  """Returns the decoder that draws sequences from a network.

  The decoder caches keys and values. For networks with documents, it instead
  recomputes the whole sequence for each symbol, because a cache cannot separate
  documents.

  Args:
    experiment: the experiment whose network draws.
    labels: the integer labels that encode the pixel order of images, see
      `Arrangement.labels`.
    length: the maximum number of symbols of a sequence; by default, as in
      training.

  Raises ValueError if the data have class labels, or if the network does not
  support this length.
  """
  network = experiment.model
  source = experiment.source
  if isinstance(source, data.Sequences):
    raise ValueError(
      f"data.name={experiment.config.data.name} has labelled examples, but only"
      " images and streams can be sampled; to score the run, use eval.py"
    )

  # To draw longer sequences, change the length of the network. This works
  # unless the network has learned an embedding for each position.
  apply = experiment.apply
  trained = network.length
  length = length or trained
  if length != trained and isinstance(source, data.Images):
    raise ValueError(
      f"--length={length} is for text, tokens, bases and sound; omit it for"
      f" images, which always have {trained} positions"
    )
  if length > trained:
    if network.axes:
      raise ValueError(
        f"--length={length} must be at most {trained}, the number of positions"
        " for which the network has learned embeddings; networks with"
        " model.positions=rotary have no limit"
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
  """Writes sequences to files. The format depends on the data.

  Args:
    folder: the folder in which samples.* are written.
    source: the data.
    tokens: the sequences, integers [num, length].
    **provenance: the origin of the sequences as JSON values, which are written
      to samples.json.

  Returns:
    The paths of the files.
  """
  # Delete the old provenance first, because it must never be found beside new
  # samples.
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
      files.warn(f"the samples are drawn without real images: {error}")
    save_images(paths[0], tokens, real, source)

  atomic.write_json(stem.with_suffix(".json"), provenance)
  return paths


def save_images(
  path: pathlib.Path, tokens: np.ndarray, real: np.ndarray, source: data.Images
) -> None:
  """Draws sampled images on the left, and real ones on the right.

  The frames of a clip are drawn side by side.

  Args:
    path: the PNG file to write.
    tokens: the sampled images, integers [images, positions].
    real: real images of the same shape and dtype; may be empty.
    source: the data, which define the shape of an image.
  """
  # Choose the number of images per row so that the picture is about square, and
  # enlarge small images.
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
      # Repeat the channel of gray images three times.
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
  """Converts symbols to uint8 [images, rows, columns, channels].

  The frames of a clip are side by side.
  """
  height, columns, channels = source.shape
  frames = source.frames
  rows = height // frames

  # Symbols are equally spaced levels from black to white.
  shades = symbols * 255.0 / (source.vocab_size - 1)
  pixels = shades.round().astype(np.uint8)

  # In the data, frames are below each other; in pictures, beside each other.
  clips = pixels.reshape(-1, frames, rows, columns, channels)
  beside = clips.swapaxes(1, 2)
  return beside.reshape(-1, rows, frames * columns, channels)


def no_prompts(source: data.Source, num: int) -> np.ndarray:
  """Returns empty prompts [num, 0] in the smallest dtype for all symbols."""
  return np.zeros((num, 0), np.min_scalar_type(source.vocab_size - 1))


def real_examples(source: data.Source, num: int) -> np.ndarray:
  """Reads test examples to compare with samples, integers [num, length].

  For images, returns the first `num` examples, and starts again at the first if
  the split has fewer. For streams, returns windows that are spread evenly over
  the split.
  """
  examples = source.examples("test")
  if isinstance(source, data.Images):
    places = np.arange(num) % len(examples)
  else:
    places = np.arange(num) * len(examples) // num
  return np.stack([examples[int(i)] for i in places])


def read_text(path: pathlib.Path) -> str:
  """Reads the beginning of a file of samples.

  Control characters are replaced, because a network may draw any byte, and some
  would change the state of a terminal.
  """
  with path.open("rb") as file:
    text = file.read(MAX_TEXT).decode(errors="replace")
  shown = (c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
  return "".join(shown)
