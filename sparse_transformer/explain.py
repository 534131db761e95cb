"""Reports what an experiment costs and what its positions see.

python -m sparse_transformer.explain --config=configs/cifar10.py

Prints tables: attention by pattern; the bytes that keys hold, relative to the
target; what positions see through the network; FLOPs and memory traffic of a
training step, and the bytes of its state; the cache for decoding. With
--compile, also the memory of the step, compiled for this machine. --json prints
the same as one JSON object. Draws the patterns into --out. Reads no data and
trains nothing.

python -m sparse_transformer.explain --config=configs/cifar10.py --target=h100

Instead compiles the training step, or with --part=attention only its attention,
for absent devices: whether it compiles and fits, what it launches,
and what to change if it does not fit. --target=list lists the devices.

With --workdir in place of --config, all of this is about a run's config.

python -m sparse_transformer.explain --workdir=runs/digits --example=3

Instead draws what the heads of a trained run attend to on an example of the
test split, into the folder attention of the workdir, and prints the pairs and
the entropy of each head.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from sparse_transformer import cli
from sparse_transformer.cli import config_flags, flags


def main(argv: Sequence[str]) -> None:
  args = flags.FLAGS
  _check_together(args)
  if args.example is not None:
    cli.require("workdir")
    _draw_heads(args)
  elif args.target is None:
    cli.require("config")
    _explain(args)
  elif args.target == "list":
    from sparse_transformer.targets import hardware

    print(hardware.describe())
  else:
    cli.require("config", "target")
    _compile(args)


def _check_together(args):
  """Checks that each flag has the one that it requires."""
  has_example = args.example is not None
  for name, needed, is_given in (
    ("part", "--target", args.target is not None),
    (
      "compile",
      "--config or --workdir alone",
      not (has_example or args.target),
    ),
    ("step", "--example", has_example),
    ("temperature", "--example", has_example),
    ("example", "--workdir", args.workdir is not None),
  ):
    if args[name].present and not is_given:
      raise ValueError(f"--{name} requires {needed}")
  if has_example and args.target is not None:
    raise ValueError("--example and --target cannot be combined; set only one")


def _draw_heads(args):
  """Prints what heads attend to on an example, and draws it."""
  from sparse_transformer.training.evaluation import trained_run
  from sparse_transformer.training.explanation import head_statistics

  if not 1e-6 <= args.temperature <= 1e6:
    raise ValueError(
      f"--temperature={args.temperature} must be between 1e-6 and 1e6"
    )
  step = cli.parse_step(args.step)
  run = trained_run.open_run(args.workdir, cli.exact_config())
  model, examples = run[0].model, run[0].source.examples("test")
  if args.example >= len(examples):
    raise ValueError(
      f"--example={args.example} must be less than {len(examples)}, the number"
      " of examples in the test split"
    )
  state = trained_run.restore(*run, step, with_data=True)
  tokens = examples[args.example]
  if model.classifies:
    tokens = tokens[: tokens[-1]]  # without padding, label and size
  tokens = tokens[tokens >= 0]
  folder = args.out or str(pathlib.Path(args.workdir) / "attention")
  about = dict(step=int(state.step), example=args.example)
  about["temperature"] = args.temperature
  report = head_statistics.draw(model, state.ema, tokens, folder, about)
  _print(args, report, head_statistics.render(report), folder)


def _explain(args):
  """Prints the tables, and draws the patterns."""
  from sparse_transformer.training import cautions
  from sparse_transformer.training.experiment import Experiment
  from sparse_transformer.training.explanation import network_report

  experiment = Experiment(args.config)
  model = experiment.model
  cautions.report(args.config, model)
  report = network_report.describe(args.config, model)
  path = args.workdir or config_flags.get_config_filename(args["config"])
  name = pathlib.Path(path).resolve()
  folder = args.out or f"explain/{name.name if args.workdir else name.stem}"
  report = dataclasses.replace(
    report,
    compiled=_compiled(experiment) if args.compile else None,
    pictures=network_report.draw(folder, model),
  )
  text = network_report.render(report)
  _print(args, dataclasses.asdict(report), text, folder)


def _compiled(experiment):
  """Bytes on one device of a training step, as compiled here."""
  import jax

  with jax.set_mesh(experiment.mesh):
    inputs = experiment.like, experiment.batch_like
    memory = experiment.update.lower(*inputs).compile().memory_analysis()
  return dict(
    arguments=memory.argument_size_in_bytes,
    temporaries=memory.temp_size_in_bytes,
    total=memory.argument_size_in_bytes + memory.temp_size_in_bytes,
  )


def _print(args, report, text, folder):
  print(json.dumps(report) if args.json else f"{text}\n\npictures in {folder}")


def _compile(args):
  """Compiles the experiment for a target, and prints a report."""
  from sparse_transformer.targets import compilers, hardware, rendering
  from sparse_transformer.training.distributed import mesh
  from sparse_transformer.training.experiment import Experiment

  target = hardware.parse(args.target)
  Experiment(args.config)  # checks the config
  sizes = mesh.sizes(args.config, target.num_devices)
  mesh.check_batch(args.config, sizes)
  report = compilers.compile_for(target, args.config, args.part)
  print(json.dumps(report) if args.json else rendering.render(report))


if __name__ == "__main__":
  flags.DEFINE_string(
    "out",
    None,
    "Folder of the pictures; default: explain/<config>, and for --example the"
    " folder attention in the workdir.",
  )
  flags.DEFINE_bool("json", False, "Prints one JSON object instead of tables.")
  flags.DEFINE_bool(
    "compile", False, "Also says the memory of a compiled training step."
  )
  flags.DEFINE_string(
    "target",
    None,
    "Devices to compile for, which may be absent: h100, h100:1x1x8, v5e:2x2;"
    " list prints them all.",
  )
  flags.DEFINE_enum(
    "part",
    "step",
    ["step", "attention"],
    "What to compile for the target: the training step or, by itself, the"
    " attention of each distinct layer.",
  )
  flags.DEFINE_integer(
    "example",
    None,
    "Draws what heads of a run attend to on this example of the test split,"
    " counted from 0.",
    lower_bound=0,
  )
  flags.DEFINE_string(
    "step",
    None,
    "Step of the checkpoint; or best, as in eval.py; default: last.",
  )
  flags.DEFINE_float(
    "temperature",
    1.0,
    "Divides the scores before their softmax, in what is drawn only.",
    lower_bound=1e-6,
  )
  cli.run(main, cli.on_either)
