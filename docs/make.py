"""Makes the parts of docs that show patterns, fields, functions, backends.

python docs/make.py

Each part stands between `<!-- NAME -->` and `<!-- /NAME -->`. The rest of a
page is written by hand. Pictures in the gallery contain no text, so that the
same catalogue gives the same files on every machine.
"""

import dataclasses
import functools
import inspect
import itertools
import pathlib
import re
import sys
import textwrap

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(pathlib.Path(sys.path[0]) / "tests"))

from helpers import examples

from sparse_transformer import attention, patterns, schema, tables
from sparse_transformer.attention import (
  contract,
  find_pairs,
  platforms,
  registry,
)
from sparse_transformer.figures import style
from sparse_transformer.figures.masks import (
  image_of_matrix,
  image_of_query,
  panels,
  show,
  shown_query,
)
from sparse_transformer.patterns import Pattern

DOCS = pathlib.Path(__file__).resolve().parent
# The picture of the README, of an image small enough to see its cells.
SIDE = 12
SHOWN = {
  "dense": "Causal()",
  "local": "Local(12)",
  "strided": "Local(12) | Strided(12)",
  "fixed": "Block(12) | Summary(12, 3)",
  "dilated": "Dilated(8, 4)",
  "BigBird": "BigBird(12, num_random=2)",
  "neighborhood": "Neighborhood(5, 7, 12, 1)",
}
# The gallery.
PICTURES = "figures/patterns"  # in the folder of docs
ROWS, COLUMNS = 8, 12  # of the data in which a query's keys are drawn
POSITIONS = ROWS * COLUMNS
CELL = 2  # pixels of a pair; a position of the data is as wide as all columns
GAP = 12  # pixels between the two views
# Patterns whose keys are drawn as the bytes that they hold, in the same data.
SHOWN_HELD = {
  "Local(5)": "a window",
  "Strided(12)": "the paper's column",
  "Strided(12, offset=1)": "the column of the target",
}
HELD = "figures/held.png"
# Input for content-based patterns: the number of regions of similar positions,
# the width of vectors, and the standard deviation of the noise.
REGIONS, WIDTH, NOISE = 5, 8, 0.3
# Devices by name: (platform, compute capability of an NVIDIA GPU).
DEVICES = {
  "CPU": ("cpu", 0.0),
  "NVIDIA GPU before Ampere": ("cuda", 7.5),
  "NVIDIA GPU from Ampere on": ("cuda", 8.0),
  "AMD GPU": ("rocm", 0.0),
  "TPU": ("tpu", 0.0),
}
# The dtypes, widths and options in the tables of backends.
DTYPES = "float32", "bfloat16", "float16", "float64"
HEAD_WIDTHS = 8, 16, 24, 32, 64, 96, 128, 256, 512
ASKED = {
  "segments": dict(segments=True),
  "sinks": dict(sinks=True),
  "soft cap": dict(scores=contract.Scores(softcap=1.0)),
  "bias by distance": dict(bias=True),
  "log-sum-exp": dict(lse=True),
  "positions over devices": dict(split=contract.Split(positions=("x",))),
}
# {name in configs: its factors in the second head}
NAMED = {
  name: patterns.factorize(
    name, head=1, stride=COLUMNS, window=COLUMNS, width=3, num_summaries=2
  )
  for name in patterns.FACTORIZATIONS
}


def write(folder: pathlib.Path = DOCS) -> None:
  """Writes the pictures and the parts of pages into the folder of docs."""
  from PIL import Image

  titles = [f"{name}\n{text}" for name, text in SHOWN.items()]
  # Each has one factor, the same in all heads.
  shown = [patterns.parse(text)[0][0] for text in SHOWN.values()]
  figure = panels(titles, shown, (SIDE, SIDE), SIDE**2)
  figure.savefig(folder / "patterns.png")
  (folder / PICTURES).mkdir(parents=True, exist_ok=True)
  for old in (folder / PICTURES).glob("*.png"):
    old.unlink()
  for pattern in drawn():
    # With a palette, a file is small.
    image = Image.fromarray(picture(pattern)).quantize(16)
    image.save(folder / PICTURES / file_name(pattern), optimize=True)
  draw_held().savefig(folder / HELD)
  for name in PAGES:
    (folder / name).write_text(fill(folder / name))


def fill(path: pathlib.Path) -> str:
  """Returns the text of a page, with its generated parts regenerated."""
  text = path.read_text()
  for name, paragraphs in PAGES[path.name]().items():
    before, _, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- /{name} -->\n")
    part = [f"<!-- {name} -->", *paragraphs, end]
    text = before + "\n\n".join(map(str.strip, part)) + "\n" + after
  return text


def drawn() -> list[Pattern]:
  """Returns all patterns in the gallery, each once."""
  static = [p for e in examples.STATIC.values() for p in e.small]
  content = [p for shown in examples.CONTENT.values() for p in shown]
  return list(dict.fromkeys([*static, *content]))


@dataclasses.dataclass(frozen=True, eq=False)
class _Realized(Pattern):
  """The pairs of a content-based pattern for the input `given_input`."""

  pairs_of: np.ndarray

  def mask(self, q, k):
    return self.pairs_of[q, k]


@functools.lru_cache(maxsize=64)
def realize(pattern: Pattern) -> Pattern:
  """Returns a pattern with fixed pairs: those for the input `given_input`."""
  if not pattern.contents():
    return pattern
  vectors, centers = given_input()
  directions = {}
  for content in pattern.contents():
    if isinstance(content, patterns.Routing):
      directions[content] = centers[None, : content.num_directions]
    elif content.blocks_from:
      shape = content.given_shape(1, 1, len(vectors), WIDTH)
      # Random blocks: a pattern ignores blocks that are not in the past.
      blocks = np.random.RandomState(0).randint(0, len(vectors), shape)
      directions[content] = (blocks // content.size).astype(np.int32)
  q_BLHK = vectors[None, :, None]
  mask_BHLM = find_pairs((pattern,), q_BLHK, q_BLHK, directions)
  return _Realized(np.asarray(mask_BHLM)[0, 0])


def given_input() -> tuple[np.ndarray, np.ndarray]:
  """Returns vectors of positions [positions, K] and of regions [regions, K]."""
  random = np.random.RandomState(6)  # a seed that fills each region
  places = random.rand(REGIONS, 2) * (ROWS, COLUMNS)
  at = np.stack(np.divmod(np.arange(POSITIONS), COLUMNS), axis=1)
  region = np.linalg.norm(at[:, None] - places, axis=-1).argmin(1)
  centers = random.standard_normal((REGIONS, WIDTH)).astype(np.float32)
  noise = random.standard_normal((POSITIONS, WIDTH))
  return (centers[region] + NOISE * noise).astype(np.float32), centers


def file_name(pattern: Pattern) -> str:
  """Returns a file name, such as 'local_7_causal_false_strided_3.png'."""
  return re.sub(r"\W+", "_", str(pattern)).strip("_").lower() + ".png"


def picture(pattern: Pattern) -> np.ndarray:
  """Returns an RGB image: the keys of one query, and below them all pairs."""
  pattern = realize(pattern)
  above = image_of_query(pattern, POSITIONS, (ROWS, COLUMNS))
  below = image_of_matrix(pattern, POSITIONS)
  above = _framed(above, CELL * POSITIONS // COLUMNS, lines=True)
  below = _framed(below, CELL)
  gap = np.full((GAP, above.shape[1], 3), 255, np.uint8)
  return np.concatenate([above, gap, below])


def draw_held():
  """Draws the bytes that the keys of a query hold, in a panel per pattern."""
  figure, axes = style.subplots(1, len(SHOWN_HELD), 9, 2.7)
  y, x = divmod(shown_query(POSITIONS), COLUMNS)
  for axis, (text, about) in zip(axes[0], SHOWN_HELD.items(), strict=True):
    matrix = patterns.parse(text)[0][0].matrix(POSITIONS)
    # Byte j is held by key j + 1.
    held = _Realized(np.pad(matrix[:, 1:], ((0, 0), (0, 1))))
    show(axis, image_of_query(held, POSITIONS, (ROWS, COLUMNS)))
    axis.set_title(f"{about}\n{text}", fontsize="medium", color=style.DARK)
    axis.plot(x, y - 1, "o", ms=5, color=style.COLORS[1])
    for row, label in ((y, "target"), (y - 1, "byte above")):
      axis.text(x + 0.7, row, label, va="center", fontsize="small")
  return figure


def _framed(cells, size, lines=False):
  """Draws cells of size x size pixels in a frame, optionally with lines."""
  line = style.rgb(style.GRID)
  image = cells.repeat(size, 0).repeat(size, 1)
  if lines:
    image[::size], image[:, ::size] = line, line
  frame = np.full(np.add(image.shape, (2, 2, 0)), line, np.uint8)
  frame[1:-1, 1:-1] = image
  return frame


# The parts of pages, as paragraphs.


def _of_patterns():
  return dict(
    contents=_contents(),
    names=_names(),
    layouts=_layouts(),
    static=_sections("##", patterns.CATALOGUE),
    following=_sections("###", patterns.CONTENT),
  )


def _of_config():
  titles = "field", "default", "meaning", "values"
  rows = [
    (f"`{name}`", f"`{default}`", about, _shorter(values))
    for name, default, about, values in schema.table()
  ]
  return dict(fields=[tables.markdown([titles, *rows])])


def _shorter(values):
  """Shortens the description of values: the page explains what is left out."""
  if values in ("a string", "True or False"):
    return ""
  values = re.sub(r" and below (2,147,|4,294,|10,001)[\d,]*", "", values)
  values = re.sub(r"^(one of|an? (integer|finite number)) ", "", values)
  signs = {"at least ": "≥", "at most ": "≤", "below ": "<", "above ": ">"}
  for words, sign in signs.items():
    values = values.replace(words, sign)
  return values.replace(" and ", ", ")


def _of_api():
  """The functions of `attention`, then the functions that make patterns."""
  names = "attend as_attention_fn attend_next fill_cache init_cache"
  names += " describe verify"
  exported = [getattr(attention, name) for name in names.split()]
  of_patterns = "parse", "where", "explicit", "assign", "register"
  named = [getattr(patterns, name) for name in of_patterns]
  parts = dict(attention=exported, names=named)
  return {x: [*itertools.chain(*map(_document, parts[x]))] for x in parts}


def _of_backends():
  """The tables of what each backend supports, by its own `unsupported`."""
  return dict(
    widths=[_widths(), _supported_widths()],
    options=[_supported_options()],
    choice=[_choice()],
  )


def _request(name, platform, **changes):
  """Makes a request: for dense attention from cuDNN, else for a window."""
  pattern = patterns.Causal() if name == "cudnn" else patterns.Local(64)
  settings = dict(
    patterns=(pattern,),
    batch=1,
    length=4096,
    num_key_heads=1,
    qk_width=64,
    value_width=64,
    dtype="bfloat16",
    value_dtype="bfloat16",
    platform=platform,
  )
  return contract.Request(**settings | changes)


def _runs(name, device, **changes):
  """Whether a backend supports a request on a device."""
  platform, capability = DEVICES[device]
  with platforms.targeting(platform, capability):
    try:
      registry.resolve(name, _request(name, platform, **changes))
    except contract.Unsupported:
      return False
  return True


def _backends():
  """{name of a backend: the devices on which it runs}."""
  names = [name for name in registry.names() if name != "auto"]
  return {name: [x for x in DEVICES if _runs(name, x)] for name in names}


def _widths():
  *widths, last = HEAD_WIDTHS
  return _fill(
    "This table lists which widths of heads are supported in each dtype, if"
    " keys and values have the same width (K = E). The widths"
    f" {', '.join(map(str, widths))} and {last} were checked. In float32,"
    " `triton` also supports values of width E = 128, if K is at most 64."
  )


def _supported_widths():
  titles = "backend", "devices", *DTYPES
  rows = [titles]
  for name, devices in _backends().items():
    where = "all" if len(devices) == len(DEVICES) else ", ".join(devices)
    cells = []
    for dtype in DTYPES:
      widths = [
        width
        for width in HEAD_WIDTHS
        if _runs(
          name,
          devices[0],
          dtype=dtype,
          value_dtype=dtype,
          qk_width=width,
          value_width=width,
        )
      ]
      cells.append(_ranges(widths))
    rows.append((f"`{name}`", where, *cells))
  return tables.markdown(rows)


def _ranges(widths):
  """Describes widths of heads: "all", "up to 128", or a list."""
  if not widths:
    return "no"
  if len(widths) == len(HEAD_WIDTHS):
    return "all"
  if list(HEAD_WIDTHS[: len(widths)]) == widths:
    return f"up to {widths[-1]}"
  return ", ".join(map(str, widths))


def _supported_options():
  rows = [("backend", *ASKED)]
  for name, devices in _backends().items():
    cells = (
      "yes" if _runs(name, devices[0], **asked) else "no"
      for asked in ASKED.values()
    )
    rows.append((f"`{name}`", *cells))
  return tables.markdown(rows)


def _choice():
  """The backend that `auto` chooses on each device."""
  shown = patterns.Causal(), patterns.Local(64)
  rows = [("device", *(f"`{pattern}`" for pattern in shown))]
  for device, (platform, capability) in DEVICES.items():
    with platforms.targeting(platform, capability):
      chosen = (
        registry.resolve("auto", _request("", platform, patterns=(pattern,)))
        for pattern in shown
      )
      rows.append((device, *(f"`{name}`" for name in chosen)))
  return tables.markdown(rows)


def _document(public):
  """Yields the signature and docstring of a function, as paragraphs."""
  yield f"### {public.__name__}"
  source = textwrap.dedent(inspect.getsource(public))
  head = re.search(r"(?ms)^(def .*?):$", source)
  yield f"```python\n{head[1]}\n```"
  yield from _paragraphs(public)


PAGES = {
  "patterns.md": _of_patterns,
  "config.md": _of_config,
  "api.md": _of_api,
  "backends.md": _of_backends,
}


def _contents():
  names = ["Names and expressions", "What keys hold", *patterns.CATALOGUE]
  names.append("Content-based patterns")
  links = (f"[{n}](#{n.lower().replace(' ', '-')})" for n in names)
  yield _fill(" · ".join(links))


def _sections(level, catalogue):
  """Yields a section for each class: its description and its examples."""
  for name, cls in catalogue.items():
    yield f"{level} {name}"
    yield from _describe(cls)
    of_static = examples.STATIC.get(name)
    shown = of_static.small if of_static else examples.CONTENT[name]
    shown = list(dict.fromkeys(shown))
    yield _table([f"`{pattern}`" for pattern in shown], shown)


def _names():
  rows = [
    (f"`{name}`", ", ".join(f"`{factor}`" for factor in factors))
    for name, factors in NAMED.items()
  ]
  yield tables.markdown([("name", "factors"), *rows])


def _layouts():
  rows = []
  for name in patterns.PUBLISHED:
    factors = patterns.factorize(
      name, stride=1, window=128, width=1, num_summaries=1
    )
    runs = ((x, len([*group])) for x, group in itertools.groupby(factors))
    shown = (f"{count} `{x}`" if count > 1 else f"`{x}`" for x, count in runs)
    rows.append((f"`{name}`", ", ".join(shown)))
  yield tables.markdown([("name", "repeating sequence of layers"), *rows])


def _describe(cls):
  """Yields the signature and docstring of a class, as paragraphs."""
  yield f"`{patterns.signature(cls)}`"
  yield from _paragraphs(cls)


def _paragraphs(public):
  """Yields the paragraphs of a docstring; arguments and errors are lists."""
  for paragraph in inspect.cleandoc(public.__doc__).split("\n\n"):
    head, _, rest = paragraph.partition("\n")
    if head in ("Args:", "Attributes:", "Raises:"):
      if head == "Raises:":
        yield head
      fields = re.split(r"\n(?=\S)", textwrap.dedent(rest))
      bullets = (re.sub(r"^([\w*, ]+):", r"- `\1`:", field) for field in fields)
      yield "\n".join(_fill(bullet, "  ") for bullet in bullets)
    elif not head.startswith((">>>", "See `init_cache` for")):
      url = r"[arXiv \1](https://arxiv.org/abs/\1)"
      text = " ".join(paragraph.split())
      yield _fill(re.sub(r"arXiv (\d{4}\.\d{5})", url, text))


def _fill(text, indent=""):
  return textwrap.fill(
    " ".join(text.split()),
    100,
    subsequent_indent=indent,
    break_long_words=False,
    break_on_hyphens=False,
  )


def _table(titles, shown):
  """A table of patterns side by side: title, picture and number of keys."""
  pictures = [f"![]({PICTURES}/{file_name(p)})" for p in shown]
  return tables.markdown([titles, pictures, [*map(_count, shown)]])


def _count(pattern):
  i = np.arange(POSITIONS)
  counts = realize(pattern).mask(i[:, None], i).sum(1)
  return f"{counts.min()}–{counts.max()}, mean {counts.mean():.1f}"


if __name__ == "__main__":
  write()
