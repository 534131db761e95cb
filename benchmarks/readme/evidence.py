"""The generated parts of docs/evidence.md, and what the README repeats of them.

Differences are of means over seeds; every error is half of a 95 % confidence
interval, of Welch's for a difference. Receptive fields are computed from the
patterns, layers and lengths of the records.
"""

import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import scipy.stats

from benchmarks import record
from benchmarks.readme import receptive
from sparse_transformer import patterns, tables

LARGE, NEARBY = "cifar10_large", "32 nearby bytes in each layer"
# By record of a run: its data, its pattern, and rows of the record of baselines
# of the same data.
TRAINED = {
  "digits": ("8 x 8 digits", "strided", ("digits", "independent positions")),
  "cifar10_medium": (
    "CIFAR-10",
    NEARBY,
    ("cifar10", "`JPEG XL -e 9`", "linear, 12 pixels"),
  ),
  LARGE: ("CIFAR-10", NEARBY, ("cifar10",)),
  "text_medium": (
    "6 MB of Wikipedia",
    "a window of 128 bytes",
    ("bytes", "`PPMd -o16`", "`PPMd -o6`"),
  ),
}
SPLITS = "test", "validation"
ABOVE_BACK, SEES_ABOVE = 96, "sees the byte above"
SEES_FRAME = "sees the pixel one frame back"
COLUMN, PAPERS = "Local(16) | Strided(96, 1)", "Local(16) | Strided(96)"
ABOVE = "Local(16) | Strided(96, 1) & Local(97)"
# Of clips: the column of the target, and the pixels around it a frame before.
VIDEO = "Local(16) | Strided(256, 1)"
AROUND = " | ".join(f"Local({i}) - Local({i - 3})" for i in (241, 257, 273))
# By record: its setting, the column of the target, and the paper's.
WINDOW = "Local(36)"  # beside them in all three
COLUMNS = {
  "cifar10_keys": ("2 layers, 400 steps", COLUMN, PAPERS),
  "cifar10_deep": ("4 layers, 300 steps", COLUMN, PAPERS),
  "cifar10_interleaved": (
    "4 layers, one factor in each, 110 CPU seconds",
    "Local(48), Strided(96, 1)",
    "Local(48), Strided(96)",
  ),
}
# By pattern, what it holds of an image, and of one that is stored by planes.
HOLDS = {
  ABOVE: "16 bytes before the target, and the byte above it",
  "Local(17)": "17 bytes before the target",
  "Local(16) | Local(104) - Local(88)": "16 before it, and 16 around that byte",
  "Local(97)": "97 bytes before the target, and so the byte above it",
  COLUMN: "16 bytes before the target, and all above it",
}
NEAR = "Local(8) | Local(34) - Local(29)"
PLANES = "Local(1026) - Local(1021) | Local(2050) - Local(2045)"
IN_PLANES = {
  f"{NEAR} | {PLANES}": "13 near, 5 in each earlier plane",
  "Local(17) | Strided(1024, 1)": "17 before it, its pixel in earlier planes",
  "Local(10) | Local(36) - Local(28)": "10 before it, 8 above",
  "Local(18)": "18 before it",
}
# Earlier frames in which a pattern has the target's pixel; records of films.
FRAMES = {
  "Local(24)": "none",
  "Local(16) | Strided(256)": "all, one byte off",
  "Local(23) | Strided(256, 1) & Local(257)": "1",
  f"Local(16) | {AROUND}": "1, and around it",
  "Local(20) | Strided(256, 1) & Local(1025)": "4",
  VIDEO: "all",
}
NOISY = "noise of ±2"
FILMS = {
  "as filmed": ("video_clips",),
  "other seeds": ("video_seed10", "video_seed11"),
  "1,600 steps": ("video_longer",),
  NOISY: ("video_noisy",),
  "trained on `bikes`": ("video_moving",),
}
# By orders of digits: choices in which the network is given the order, or not.
ORDERS = {
  "4: turned": ("('rotation',)", "() with data.name=digits_rotated"),
  "192: also transposed, quarters permuted": (
    "('rotation','transposition','jigsaw')",
    "() with data.name=digits_puzzles",
  ),
}
# By file of a record's scores: videos on which no network was trained.
OTHER_VIDEOS = {
  "carphone.npy": "another camera",
  "bikes.npy": "`bikes`",
}
# Without a network, by what they see: only this frame, and also the one before.
ONE_FRAME = "`FFV1`", "linear, 12 pixels"
TWO_FRAMES = "linear, 21 pixels", "`x264 -qp 0`"
# Of all frames but the first: the bytes that a table of counts sees.
COUNTS = {
  "counts, 256 contexts": "1",
  "counts, 289 contexts": "5",
  "counts, 4,913 contexts": "6",
}
# On the test split of CIFAR-10, without augmentation.
PUBLISHED_BITS = "2.80"  # Child et al. 2019, Table 1
PUBLISHED = {
  "PixelCNN": ("3.14", "1601.06759"),
  "Glow": ("3.35", "1807.03039"),
  "Real NVP": ("3.49", "1605.08803"),
}


def interval(values: Sequence[float], than: Sequence[float] = ()) -> str:
  """The mean of some values, or the difference of two means, with its error.

  One or two values are listed: they say little about their error.

  >>> interval([1.0, 1.1, 0.9]), interval([2.0, 2.1], [1.0, 1.1])
  ('1.000 ± 0.248', '+1.000 ± 0.304')
  """
  if len(values) < 3 and not than:
    return ", ".join(f"{x:.3f}" for x in values)
  if than:
    test, sign = scipy.stats.ttest_ind(values, than, equal_var=False), "+"
  else:
    test, sign = scipy.stats.ttest_1samp(values, 0), ""
  low, high = test.confidence_interval()
  return f"{(low + high) / 2:{sign}.3f} ± {(high - low) / 2:.3f}"


def values(name: str, choice: str) -> list[float]:
  """Bits of a choice of a comparison on the validation split, by seed."""
  return rows_of(name, "choice")[choice]["values"]


def repeated() -> Iterator[str]:
  """Random symbols that repeat: the column of the target beside the paper's."""
  name, period = "repeat", 256
  found = record.read(name)
  seen = receptive.fields(found, period)
  titles = (
    "pattern",
    "keys",
    "receptive field",
    "sees the symbol",
    "bits/symbol",
  )
  rows = [titles]
  for row in found["rows"]:
    choice = row["choice"]
    cells = f"`{choice}`", f"{row['keys']:.1f}", *seen[choice]
    rows.append((*cells, interval(row["values"])))
  yield tables.markdown(rows)
  yield records(name)


def columns() -> Iterator[str]:
  """All patterns of three comparisons with the column of the target."""
  titles = "network, budget", "pattern", "keys", "receptive field"
  rows = [(*titles, SEES_ABOVE, "bits/dim", f"minus `{WINDOW}`")]
  gaps = []
  for name, (about, target, papers) in COLUMNS.items():
    found = record.read(name)
    seen, base = receptive.fields(found, ABOVE_BACK), values(name, WINDOW)
    for row in found["rows"]:
      choice, own = row["choice"], row["values"]
      cells = f"`{_shown(choice)}`", f"{receptive.keys(found, choice):,.1f}"
      gap = interval(own, base) if own != base else ""
      rows.append((about, *cells, *seen[choice], interval(own), gap))
    gap = interval(values(name, papers), values(name, target))
    gaps.append(f"{gap} ({about})")
  yield tables.markdown(rows)
  text = f"The paper's column minus the target's: {'; '.join(gaps)}.\n"
  yield textwrap.fill(text, 100) + "\n"
  yield records(*COLUMNS)


def orders() -> Iterator[str]:
  """Digits in orders that the network is told, and as more images."""
  name, titles = "digits_orders", ("orders", "told", "not told")
  rows = [(*titles, "not told minus told")]
  rows += [("1: upright", interval(values(name, "()")), "", "")]
  rows += [_pair(name, about, *pair) for about, pair in ORDERS.items()]
  yield tables.markdown(rows)
  yield records(name)


def _pair(name, about, *choices):
  """Two choices of a comparison, and the second minus the first."""
  found = [values(name, choice) for choice in choices]
  return about, *map(interval, found), interval(*found[::-1])


def one_key() -> Iterator[str]:
  """The byte above the target in place of a key of a window."""
  back = ABOVE_BACK, SEES_ABOVE
  yield _scores("cifar10_above", ABOVE, "what it holds", HOLDS, *back)
  yield records("cifar10_above")


def longer() -> Iterator[str]:
  """How patterns rank early and late in training."""
  name, steps = "cifar10_longer", (500, 2000, 6000)
  holds = {_pattern(choice): about for choice, about in HOLDS.items()}
  found, early = record.read(name), {}
  for run in found["runs"]:
    curve = run["curve"]
    bits = dict(zip(curve["steps"], curve["bits_per_dim"], strict=True))
    early.setdefault(run["choice"], []).append([bits[x] for x in steps])
  seen = receptive.fields(found, ABOVE_BACK)
  titles = "what it holds", "keys", "receptive field", SEES_ABOVE
  titles += *(f"{x:,}" for x in steps), "6,000, all images"
  rows = [(*titles, "minus the byte alone")]
  scores = {_pattern(row["choice"]): row["values"] for row in found["rows"]}
  base = scores[_pattern(ABOVE)]
  for row in found["rows"]:
    choice, own = _pattern(row["choice"]), row["values"]
    means = (f"{x:.2f}" for x in np.mean(early[row["choice"]], 0))
    gap = interval(own, base) if own != base else ""
    cells = holds[choice], f"{row['keys']:.1f}", *seen[row["choice"]], *means
    rows.append((*cells, interval(own), gap))
  yield tables.markdown(rows)
  yield records(name)


def planes() -> Iterator[str]:
  """Images stored by planes: the pixel that is known in another color."""
  name, ends = "cifar10_planar", (1024, 2048, 3072)
  seen = receptive.fields(record.read(name), ends[0])
  titles = "a query holds", "keys in each", "receptive field"
  titles += "sees an earlier plane", "bits/dim"
  rows = [(*titles, "red", "green", "blue")]
  for choice in rows_of(name, "choice"):
    ((pattern,),) = _pattern(choice)
    keys = np.diff([0, *map(pattern.pairs, ends)]) / 1024
    counted = ", ".join(f"{x:.0f}" for x in keys)
    cells = IN_PLANES[choice], counted, *seen[choice]
    bits = _by_part(name, 3, pattern=choice, split="validation")
    rows.append((*cells, *map(interval, (values(name, choice), *bits.T))))
  yield tables.markdown(rows)
  yield records(name)


def _by_part(name, number, **of):
  """Bits in equal parts of sequences, [seeds, parts], of some evaluations."""
  scores = record.read(name)["evaluations"]
  bits = [x["by_position"] for x in scores if of.items() <= x.items()]
  return np.reshape(bits, (len(bits), number, -1)).mean(2)


def _shown(choice):
  """The text of a pattern, with parentheses where & binds before |."""
  return re.sub(r"\| (\w+\([^|]+\) & [^|]+)", r"| (\1)", choice)


def _scores(name, than, title, abouts, back, sees):
  """All patterns of a comparison of images, the best first."""
  titles = "pattern", title, "keys", "receptive field", sees
  rows = [(*titles, "rate", "bits/dim", "minus the first")]
  found = record.read(name)
  base, rates = values(name, than), found["tuning"]["best"]
  seen = receptive.fields(found, back)
  for row in found["rows"]:
    choice, own = row["choice"], row["values"]
    cells = f"`{_shown(choice)}`", abouts[choice], f"{row['keys']:.1f}"
    gap = interval(own, base) if own != base else ""
    rows.append((*cells, *seen[choice], rates[choice], interval(own), gap))
  return tables.markdown(rows)


def video() -> Iterator[str]:
  """Patterns on clips of one camera, and where they were not trained."""
  name = "video_clips"
  yield _scores(name, VIDEO, "earlier frames", FRAMES, 256, SEES_FRAME)
  titles = "earlier frames, or a model without a network", "receptive field"
  titles += "test", "frame 1", "frames 2 to 16"
  rows, seen = [(*titles, *OTHER_VIDEOS.values())], fields_of_videos()
  for choice, about in FRAMES.items():
    test = dict(pattern=choice, split="test")
    frames = _by_part(name, 16, data="", **test)
    found = [frames.mean(1), frames[:, 0], frames[:, 1:].mean(1)]
    found += [_by_part(name, 1, data=x, **test)[:, 0] for x in OTHER_VIDEOS]
    rows.append((about, seen[choice], *map(interval, found)))
  known = rows_of("baselines_video")
  for model in (*ONE_FRAME, *TWO_FRAMES, *COUNTS):
    bits, others = f"{known[model]['test']:.3f}", [""] * len(OTHER_VIDEOS)
    scores = ("", "", bits) if model in COUNTS else (bits, "", "")
    rows.append((model, COUNTS.get(model, ""), *scores, *others))
  yield tables.markdown(rows)
  copied = 100 * known[next(iter(COUNTS))]["copied"]
  about = "Of the bytes of test frames 2 to 16"
  yield f"{about}, {copied:.0f} % equal the byte one frame back."
  yield records(name, "baselines_video")


def fields_of_videos() -> dict[str, str]:
  """{pattern of `FRAMES`: bytes of the receptive field}."""
  seen = receptive.fields(record.read("video_clips"))
  return {choice: cells[0] for choice, cells in seen.items()}


def equal_time() -> Iterator[str]:
  """Dense attention, also on shorter clips, in as much processor time."""
  name = "video_dense"
  found = record.read(name)
  seen = receptive.fields(found, 256)
  titles = "pattern", "frames of a clip", "receptive field", SEES_FRAME
  titles += "rate", "steps", "bits/dim"
  rows = [(*titles, "frames 2 to 4 of each 4")]
  for row in found["rows"]:
    pattern, data = row["choice"].split(" with ")
    length = 4 if "clips4" in data else 16
    own = dict(pattern=pattern, length=256 * length, split="validation")
    parts = _by_part(name, length, **own)[:, np.arange(length) % 4 > 0]
    scores = map(interval, (row["values"], parts.mean(1)))
    about = found["tuning"]["best"][row["choice"]], f"{row['steps']:.0f}"
    cells = f"`{pattern}`", str(length), *seen[row["choice"]]
    rows.append((*cells, *about, *scores))
  yield tables.markdown(rows)
  yield records(name)


def frames() -> Iterator[str]:
  """Bits by how many earlier frames show the target's pixel."""
  rows, bits = [("earlier frames", "receptive field", *FILMS)], {}
  seen = fields_of_videos()
  for film, names in FILMS.items():
    for row in (row for name in names for row in record.read(name)["rows"]):
      bits.setdefault((film, _pattern(row["choice"])), []).extend(row["values"])
  for choice, about in FRAMES.items():
    found = [bits.get((film, _pattern(choice)), []) for film in FILMS]
    rows.append((about, seen[choice], *map(interval, found)))
  *_, one, around, four, every = map(_pattern, FRAMES)
  for about, pattern in ("4", four), ("all", every):
    gaps = []
    for film in FILMS:
      rivals = [bits[film, x] for x in (one, around) if (film, x) in bits]
      gaps.append(interval(min(rivals, key=np.mean), bits[film, pattern]))
    rows.append((f"best of 1, minus {about}", "", *gaps))
  # The entropy of the noise, and that of the difference of two noisy copies.
  noise = np.full(5, 1 / 5)
  known = {"(the noise)": noise, "(one copy)": np.convolve(noise, noise)}
  for about, p in known.items():
    cell = f"{scipy.stats.entropy(p, base=2):.3f}"
    rows.append((about, "", *(cell if x == NOISY else "" for x in FILMS)))
  yield tables.markdown(rows)
  yield records(*itertools.chain(*FILMS.values()))


def beside_counts() -> Iterator[str]:
  """Frames 2 to 16 of validation: networks, and tables of counts."""
  films = {
    "as filmed": ("video_clips", "baselines_video"),
    "1,600 steps": ("video_longer", "baselines_video"),
    NOISY: ("video_noisy", "baselines_video_noisy"),
  }
  rows, seen = (
    [("earlier frames", "receptive field", *films)],
    fields_of_videos(),
  )
  *_, one, around, four, every = FRAMES
  for choice in (one, around, four, every):
    found = [_later(name, choice) for name, _ in films.values()]
    rows.append((FRAMES[choice], seen[choice], *map(interval, found)))
  for model, size in COUNTS.items():
    known = [rows_of(name)[model] for _, name in films.values()]
    cells = (f"{row['validation']:.3f}" for row in known)
    rows.append((model, size, *cells))
  yield tables.markdown(rows)
  yield records(*dict.fromkeys(itertools.chain(*films.values())))


def _later(name, choice):
  """Bits after frame 1 of a choice's runs, where they have an evaluation."""
  kept = rows_of(name, "choice").get(choice, {}).get("values", [])
  scores = [
    x["by_position"]
    for x in record.read(name)["evaluations"]
    if (x["pattern"], x["split"]) == (choice, "validation")
    and x["bits_per_dim"] in kept
  ]
  return [np.mean(bits[len(bits) // 16 :]) for bits in scores]


def _pattern(choice):
  """The pattern of a choice, which may set more, however it is written."""
  return patterns.parse(choice.split(" with ")[0])


def rows_of(name: str, key: str = "model") -> dict[str, dict[str, Any]]:
  """The rows of a record, by default one of baselines, by a value they have."""
  return {row[key]: row for row in record.read(name)["rows"]}


def compressors() -> Iterator[str]:
  """Trained networks beside what is known without one, on both splits."""
  rows, names = [("data", "model", "sees", "test", "validation")], []
  for name, (about, _, (baselines, *models)) in TRAINED.items():
    run = record.read(name)
    scores = [x for x in run["evaluations"] if not x["min_context"]]
    step = next(x["step"] for x in scores if x["split"] == "test")
    found = {x["split"]: x["bits_per_dim"] for x in scores if x["step"] == step}
    bits = (f"{found[x]:.3f}" if x in found else "" for x in SPLITS)
    rows.append((about, f"`{name}`", f"{_seen_bytes(run)} bytes", *bits))
    names += name, f"baselines_{baselines}"
    known = rows_of(names[-1])
    for model in models:
      row = known[model]
      bits = (f"{row[x]:.3f}" for x in SPLITS)
      rows.append(("", model, row["sees"], *bits))
    if name == LARGE:
      sparse = "Sparse Transformer, 59M, as published", "its image"
      rows.append(("", *sparse, PUBLISHED_BITS, ""))
      for model, (score, paper) in PUBLISHED.items():
        link = f"{model}, [as published](https://arxiv.org/abs/{paper})"
        rows.append(("", link, "", score, ""))
  yield tables.markdown(rows)
  yield records(*dict.fromkeys(names))


def _seen_bytes(run):
  """The bytes of the receptive field of a trained run."""
  config = run["config"]
  if config["data"]["name"] == "bytes":
    n = config["data"]["length"]
  else:
    n = run["evaluations"][0]["tokens"] // run["evaluations"][0]["examples"]
  return f"{receptive.count(receptive.layers_of(config), n):,}"


def trained() -> str:
  titles = "config", "data", "pattern", "receptive field"
  titles += "parameters", "trained for"
  rows = [(*titles, "test", "for comparison")]
  for name, (about, pattern, (baselines, *models)) in TRAINED.items():
    run = record.read(name)
    (score, *_) = record.test_scores(run)
    known = rows_of(f"baselines_{baselines}")
    others = [f"{model} {known[model]['test']:.2f}" for model in models]
    if name == LARGE:
      others += [f"{x} {score}" for x, (score, _) in PUBLISHED.items()]
      others += [f"the paper's 59M parameters {PUBLISHED_BITS}"]
    bits = f"{score['bits_per_dim']:.2f} {score['unit']}"
    size = f"{run['parameters'] / 1e6:.1f}M"
    time = f"{_time(run)}, {run['machine']}"
    seen = f"{_seen_bytes(run)} bytes"
    cells = f"`{name}`", about, pattern, seen, size, time
    rows.append((*cells, bits, ", ".join(others)))
  return tables.markdown(rows)


def _time(run):
  """How long a run trained: on CPUs, the time over all cores."""
  if "cores of" in run["machine"]:
    return f"{max(1, round(run['processor_seconds'] / 60)):,} CPU minutes"
  return f"{run['seconds'] / 60:.0f} minutes"


def card(name: str) -> str:
  """What made the weights of a run, and what they score."""
  run, (about, pattern, _) = record.read(name), TRAINED[name]
  size = f"{run['parameters']:,} parameters"
  rows = [("", ""), ("data", about)]
  rows += [("network", f"`configs/{name}.py`: {pattern}, {size}")]
  rows += [("receptive field", f"{_seen_bytes(run)} bytes")]
  rows += [("command", f"`{run['command']}`")]
  made = run["commit"], run["machine"], _time(run)
  rows += [("commit, machine, time", ", ".join(made))]
  for x in run["evaluations"]:
    if x["step"] == run["steps"]:
      bits = f"{x['bits_per_dim']:.5f}, {x['examples']:,} examples"
      rows += [(f"{x['unit']}, {x['split']}", bits)]
  return tables.markdown(rows)


def records(*names: str) -> str:
  link = "[`{0}`](../benchmarks/results/{0}.json)"
  links = ", ".join(map(link.format, names))
  text = f"Records: {links}."
  return textwrap.fill(text, 100, break_on_hyphens=False)


def commands() -> str:
  """The command, commit and machine of each record that has one command."""
  blocks = []
  for path in sorted(record.FOLDER.glob("*.json")):
    found = record.read(path.stem)
    about = found.get("about", found) if isinstance(found, dict) else {}
    if "command" in about:
      seeds = f", {x} seeds" if (x := about.get("seeds", 1)) > 1 else ""
      made = f"{about['commit']}, {about['machine']}{seeds}"
      blocks.append(f"`{path.stem}`: {made}\n\n    {about['command']}")
    elif isinstance(found, list) and (text := changed(found)):
      blocks.append(f"`{path.stem}`: {text}")
  return "\n\n".join(blocks)


def changed(entries: Sequence[dict[str, Any]]) -> str:
  """How many entries are of code with changes that no commit has."""
  number = sum(x["commit"].endswith("-dirty") for x in entries)
  if not number:
    return ""
  return (
    f"{number} of {len(entries)} entries are of a tree with uncommitted changes"
    " (their commit ends in `-dirty`)."
  )
