"""Writes a self-contained HTML page about a run.

python -m sparse_transformer.report --workdir=runs/digits

Writes report.html into the workdir: results, curves, patterns, heads, samples,
bits by position, config. It shows what is in the workdir:
`eval.py` and `python -m sparse_transformer.sample` add to that, and so does
`python -m sparse_transformer.explain` with --example.
"""

import base64
import html
import io
import json
import pathlib
from collections.abc import Sequence

from sparse_transformer import atomic, cli
from sparse_transformer.cli import flags
from sparse_transformer.figures import curves

COLUMNS = "split", "step", "min_context", "weights"  # of an evaluation
# A wide table is in a box that scrolls; the page does not.
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b2733; margin: 2rem auto;
  max-width: 76rem; padding: 0 .75rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
img { max-width: 100%; vertical-align: top; }
.table { overflow-x: auto; } table { border-collapse: collapse; }
td { padding: .2rem .8rem .2rem 0; vertical-align: top;
  border-bottom: 1px solid #dde; font-variant-numeric: tabular-nums; }
pre { background: #f4f6f9; padding: .75rem; white-space: pre-wrap; }
pre, table { font-size: 14px; }
"""


def main(argv: Sequence[str]) -> None:
  """Writes the page of the run in --workdir."""
  from sparse_transformer.training import metrics
  from sparse_transformer.training.experiment import open_run

  workdir = pathlib.Path(flags.FLAGS.workdir)
  experiment, checkpoints = open_run(workdir, flags.FLAGS.config)
  checkpoints.find(None)  # there must be one
  lines = metrics.read(workdir) if (workdir / "metrics.jsonl").exists() else []
  sections = {
    "Run": _summary(experiment, lines),
    "Evaluation": _evaluations(workdir),
    "Curves": _curves(experiment, lines),
    "Patterns": _picture(workdir / "patterns.png"),
    "Heads on an example": _heads(workdir),
    "Samples": _samples(workdir),
    "Config": _text(json.dumps(experiment.config.to_dict(), indent=2)),
  }
  title = html.escape(f"Run {workdir.resolve().name}")
  body = "\n".join(f"<h2>{x}</h2>\n{y}" for x, y in sections.items() if y)
  path = workdir / "report.html"
  path.write_text(f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><style>{STYLE}</style></head>
<body><h1>{title}</h1>
{body}
</body></html>
""")
  print(f"report in {path}")


def _summary(experiment, lines):
  from sparse_transformer import model as model_lib
  from sparse_transformer.training.explanation import costs

  config, source = experiment.config, experiment.source
  network = experiment.model
  patterns = "; ".join(
    f"{pattern} after {step:,} steps" if step else pattern
    for step, pattern in model_lib.schedule(config).items()
  )
  rows = [
    ("data", f"{config.data.name}, {source.length:,} positions"),
    ("network", f"{network.num_layers} layers, width {network.width}"),
    ("parameters", f"{model_lib.count_parameters(network):,}"),
    ("FLOPs per token", f"{costs.flops_per_token(network)['total']:,.0f}"),
    ("attention", f"{patterns}, {config.attention.mode}"),
  ]
  last = {line["split"]: line for line in lines}
  for split in ("train", "validation"):
    if line := last.get(split):
      bits = f"{line['bits_per_dim']:.4f} {source.unit}{_accuracy(line)}"
      rows.append((f"last {split}", f"{bits}, step {line['step']:,}"))
  if "mfu" in (line := last.get("train", {})):
    rows.append(("model-FLOPs utilization", f"{100 * line['mfu']:.1f} %"))
  return _table(rows)


def _accuracy(values):
  return f", accuracy {values['accuracy']:.4f}" if "accuracy" in values else ""


def _evaluations(workdir):
  """The results of eval.py, with its pictures."""
  paths = sorted((workdir / "evaluations").glob("*.json"))
  if not paths:
    return _text("None: run eval.py.")
  titles = (*COLUMNS, "bits", "standard error", "tokens", "overrides")
  # Those of the run itself first.
  rows = sorted(map(_evaluation, paths), key=lambda row: row[-1] != "")
  pictures = [_picture(path.with_suffix(".png")) for path in paths]
  return "\n".join([_table([titles, *rows]), *pictures])


def _evaluation(path):
  """The cells of a result."""
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
  """What `explain --example` has drawn."""
  paths = list((workdir / "attention").glob("layer_*.png"))
  paths.sort(key=lambda path: (len(path.name), path.name))  # layer 2 before 10
  return "\n".join(map(_picture, paths))


def _samples(workdir):
  from sparse_transformer.training.evaluation import samples

  if picture := _picture(workdir / "samples.png"):
    return picture + _text(
      "Sampled images on the left, real ones on the right."
    )
  for path in (workdir / "samples.txt", workdir / "samples.fasta"):
    if path.is_file() and path.stat().st_size:
      return _text(samples.read_text(path))  # HTML allows no control characters
  return _text("None: run python -m sparse_transformer.sample.")


# Parts of the page.


def _text(text):
  return f"<pre>{html.escape(text)}</pre>"


def _table(rows):
  """A table in a box that scrolls; the first row contains the titles."""
  lines = [
    "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row)
    for row in rows
  ]
  body = "\n".join(f"<tr>{line}</tr>" for line in lines)
  return f'<div class="table"><table>\n{body}\n</table></div>'


def _picture(path):
  """A PNG file; nothing if there is none."""
  return _image(path.read_bytes(), path.stem) if path.exists() else ""


def _image(data, text):
  encoded = base64.b64encode(data).decode()
  source = f"data:image/png;base64,{encoded}"
  return f'<img alt="{html.escape(text)}" src="{source}">'


if __name__ == "__main__":
  cli.run(main, cli.on_workdir)
