"""Writes a self-contained HTML page about a run.

python -m sparse_transformer.report --workdir=runs/digits

Writes report.html into the workdir: how the run was made, results, curves,
patterns, heads, samples, bits by position, config. It shows what is in the
workdir: `eval.py` and `python -m sparse_transformer.sample` add to that, and so
does `python -m sparse_transformer.explain` with --example.
"""

import base64
import datetime
import html
import io
import pathlib
from collections.abc import Sequence

from sparse_transformer import atomic, cli, config as config_lib, data, schema
from sparse_transformer.cli import flags
from sparse_transformer.data import codecs
from sparse_transformer.figures import curves

COLUMNS = "split", "step", "min_context", "weights"  # of an evaluation
# Wide tables and pictures are in a box that scrolls; the page does not.
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b2733; margin: 2rem auto;
  max-width: 76rem; padding: 0 .75rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
h1, pre, td { overflow-wrap: break-word; }
img { max-width: 100%; vertical-align: top; }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
td, th { padding: .2rem .8rem .2rem 0; vertical-align: top; text-align: left;
  border-bottom: 1px solid #dde; font-variant-numeric: tabular-nums; }
td { max-width: 48rem; } pre, table { font-size: 14px; }
pre { background: #f4f6f9; padding: .75rem; white-space: pre-wrap; }
@media (max-width: 50rem) {
  td { max-width: 60vw; } .wide img { max-width: none; max-height: 24rem; } }
"""


def main(argv: Sequence[str]) -> None:
  """Writes the page of the run in --workdir."""
  from sparse_transformer.training import metrics
  from sparse_transformer.training.experiment import open_run

  workdir = pathlib.Path(flags.FLAGS.workdir)
  run = open_run(workdir, cli.overrides())
  run.changes(config_lib.TO_RESUME)  # what it shows is of no other config
  experiment, step = run.experiment, run.step
  lines = metrics.read(workdir) if (workdir / "metrics.jsonl").exists() else []
  changes = config_lib.read_changes(workdir)
  about = run.saved.describe(step)
  sections = {
    "Run": _summary(experiment, step, about, lines, changes),
    "Changes": _changes(changes),
    "Evaluation": _evaluations(workdir),
    "Curves": _curves(experiment, lines),
    "Patterns": _wide(_picture(workdir / "patterns.png")),
    "Heads on an example": _heads(workdir)
    + _origin(workdir / "attention" / "attention.json"),
    "Samples": _samples(workdir) + _origin(workdir / "samples.json"),
    "Config": _config(experiment.config),
  }
  title = html.escape(f"Run {workdir.resolve().name}")
  body = "\n".join(f"<h2>{x}</h2>\n{y}" for x, y in sections.items() if y)
  path = workdir / "report.html"
  text = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><style>{STYLE}</style></head>
<body><h1>{title}</h1>
{body}
</body></html>
"""
  atomic.write_text(path, text)
  print(f"report in {path}")


def _summary(experiment, step, about, lines, changes):
  from sparse_transformer import model as model_lib
  from sparse_transformer.training import costs

  config, source = experiment.config, experiment.source
  network, made = experiment.model, ("command", "begun", "commit", "machine")
  rows = [
    *((x, about[x]) for x in made if about.get(x)),
    ("trained", _trained(experiment, step, about, lines, changes)),
    ("data", _data(about)),
    ("positions", f"{source.length:,}"),
    ("network", f"{network.num_layers} layers, width {network.width}"),
    ("parameters", f"{model_lib.count_parameters(network):,}"),
    ("FLOPs per token", f"{costs.flops_per_token(network)['total']:,.0f}"),
    ("attention", f"{config.attention.pattern}, {config.attention.mode}"),
  ]
  last = {line["split"]: line for line in lines}
  for split in ("train", "validation"):
    if line := last.get(split):
      bits = f"{line['bits_per_dim']:.4f} {source.unit}{_accuracy(line)}"
      rows.append((f"last {split}", f"{bits}, step {line['step']:,}"))
  if "mfu" in (line := last.get("train", {})):
    rows.append(("model-FLOPs utilization", f"{100 * line['mfu']:.1f} %"))
  return _table((), rows)


def _data(about):
  """The source, path, sizes and digest of the data that a run was trained on.

  For example 'bytes, a.txt, 840 symbols, splits 756 + 42 + 42, crc32 1a2b3c4d'.
  """
  given = about["config"]["data"]
  parts = [given["name"], given["path"]]
  for name, value in (about.get("data") or {}).items():
    if name == "splits":
      value = " + ".join(f"{size:,}" for size in value)
    is_number = isinstance(value, int)
    parts.append(f"{value:,} {name}" if is_number else f"{name} {value}")
  return ", ".join(filter(None, parts))


def _trained(experiment, step, about, lines, changes):
  """'700 steps, 716,800 tokens, 8.0 epochs, 0:01:44, CPU time 0:03:07'."""
  length, num = experiment.model.length, about.get("examples")
  sizes = [(n, *x.get("train.batch_size", (0, 0))) for n, x in changes]
  sequences = step * experiment.config.train.batch_size
  sequences += sum(n * (before - now) for n, before, now in sizes if n < step)
  tokens = sequences * length
  if not step:
    return experiment.stage(step)
  text = f"{step:,} steps, {tokens:,} tokens"
  if num:  # of a stream, one starts at each symbol
    is_stream = isinstance(experiment.source, data.Stream)
    size = num + length - 1 if is_stream else num * length
    text += f", {tokens / size:,.2f} epochs"
  if timed := [x for x in lines if "processor_seconds" in x]:
    times = (timed[-1][x] for x in ("seconds", "processor_seconds"))
    spent = (datetime.timedelta(seconds=round(x)) for x in times)
    text += ", {}, CPU time {}".format(*spent)
  return text


def _accuracy(values):
  return f", accuracy {values['accuracy']:.4f}" if "accuracy" in values else ""


def _changes(changes):
  rows = [
    (f"{step:,}", name, *map(repr, values))
    for step, changed in changes
    for name, values in changed.items()
  ]
  return rows and _table(("after step", "field", "before", "since"), rows)


def _evaluations(workdir):
  paths = sorted((workdir / "evaluations").glob("*.json"))
  if not paths:
    return _text("None: run eval.py.")
  titles = *COLUMNS, "bits", "standard error", "tokens", "overrides", "command"
  # Scores without overrides come first.
  rows = sorted(map(_evaluation, paths), key=lambda row: row[-2] != "")
  pictures = [_picture(path.with_suffix(".png")) for path in paths]
  return "\n".join([_table(titles, rows), *pictures])


def _evaluation(path):
  try:
    result = atomic.read_json(path)
    bits, error = result["bits_per_dim"], result["standard_error"]
    overrides = result.get("overrides", {}).items()
    shown = "-" if bits is None else f"{bits:.4f} {result['unit']}"
    shown += _accuracy(result)
    if "bits_per_byte" in result:
      shown += f", {result['bits_per_byte']:.4f} bits/byte"
    return (
      *(result[column] for column in COLUMNS),
      shown,
      "-" if error is None else f"{error:.4f}",
      f"{result['tokens']:,}",
      ", ".join(f"{name}={value}" for name, value in overrides),
      result.get("command", ""),
    )
  except (ValueError, TypeError, KeyError, AttributeError):
    raise ValueError(
      f"{path} is damaged; delete it and run eval.py again"
    ) from None


def _curves(experiment, lines):
  if not lines:
    return _text("No metrics yet.")
  figure = curves.bits_by_step(lines, experiment.source.unit)
  figure.savefig(file := io.BytesIO(), format="png")
  return _image(file.getvalue(), "training and validation bits by step")


def _heads(workdir):
  paths = list((workdir / "attention").glob("layer_*.png"))
  paths.sort(key=lambda path: (len(path.name), path.name))  # layer 2 before 10
  return "\n".join(_wide(_picture(path)) for path in paths)


def _samples(workdir):
  from sparse_transformer.training.evaluation import samples

  if picture := _picture(workdir / "samples.png"):
    return picture
  for path in (workdir / "samples.txt", workdir / "samples.fasta"):
    if path.is_file() and path.stat().st_size:
      text = samples.read_text(path)  # HTML allows no control characters
      return "\n".join(map(_text, text.split(codecs.RULE.decode())))
  sounds = ", ".join(sorted(x.name for x in workdir.glob("samples_*.wav")))
  return _text(sounds or "None: run python -m sparse_transformer.sample.")


def _config(config):
  defaults = schema.flatten(schema.Config())
  fields = schema.flatten(config).items()
  rows = [(x, repr(y), repr(defaults[x])) for x, y in fields]
  changed = [row for row in rows if row[1] != row[2]]
  others = _table(("field", "value"), [x[:2] for x in rows if x not in changed])
  table = _table(("field", "value", "default"), changed)
  folded = f"<summary>Fields with their defaults</summary>{others}"
  return f"{table}<details>{folded}</details>"


def _origin(path):
  about = atomic.read_json(path, dict) if path.exists() else {}
  rows = [(x, about[x]) for x in ("step", "command") if x in about]
  return _table((), rows) if rows else ""


def _text(text):
  return f"<pre>{html.escape(text)}</pre>"


def _table(titles, rows):
  lines = [
    "<tr>" + "".join(f"<{x}>{html.escape(str(cell))}</{x}>" for cell in cells)
    for x, cells in (("th", titles), *(("td", row) for row in rows))
  ]
  return _wide("<table>\n" + "\n".join(lines) + "\n</table>")


def _wide(part):
  return part and f'<div class="wide">{part}</div>'


def _picture(path):
  if not path.exists():
    return ""
  atomic.size(path)  # which a pipe does not have
  return _image(path.read_bytes(), path.stem)


def _image(data, text):
  encoded = base64.b64encode(data).decode()
  source = f"data:image/png;base64,{encoded}"
  return f'<img alt="{html.escape(text)}" src="{source}">'


if __name__ == "__main__":
  cli.run(main, cli.on_workdir)
