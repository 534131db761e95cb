"""Reports what an experiment costs and what its positions see.

python -m sparse_transformer.explain --config=configs/cifar10.py

Prints the cost of attention by pattern; the positions that each position sees
through the network; the FLOPs of a training step; the bytes of the training
state; what the backward pass recomputes; the size of the decoding cache; and
the backends that would run attention on other devices. With --compile, it also
compiles the training step for this machine and prints the memory that it needs.
--json prints one JSON object instead. Pictures of the patterns are written into
the folder --out. The command does not train. The command reads data only for
the sources `images` and `labelled`, because the files of these sources
determine the size of the network.

python -m sparse_transformer.explain --config=configs/cifar10.py --target=h100

With --target, the command instead compiles the training step for devices that
are absent. It prints whether the step compiles, whether the step fits in the
memory of these devices, and which kernels the step launches. --part=attention
compiles only the attention. --target=list prints the available targets. Give
--workdir in place of --config to explain the config of a run.

python -m sparse_transformer.explain --workdir=runs/digits --example=3

With --example=N, the command instead draws what the heads of a run attend to in
example N of the test split. It writes the pictures to the folder `attention` of
the workdir, and prints the number of pairs and the entropy of each head.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from sparse_transformer import cli, schema, version
from sparse_transformer.cli import config_flags, flags


def main(argv: Sequence[str]) -> None:
  """Explains an experiment, compiles it for a target, or draws its heads."""
  args = flags.FLAGS
  _check_together(args)
  if args.example is not None:
    _draw_heads(args)
  elif args.target == "list":
    from sparse_transformer.targets import hardware

    print(hardware.describe())
  else:
    cli.require("config")
    if args.workdir:
      args.config.update_from_flattened_dict(cli.overrides())
    (_explain if args.target is None else _compile)(args)


def _check_together(args):
  """Raises ValueError if a flag is given without a flag that it requires."""
  # (a flag, what it requires, whether the requirement is met).
  has_example, has_target = args.example is not None, args.target is not None
  for name, needed, is_given in (
    ("part", "--target", has_target),
    ("compile", "no --target or --example", not (has_example or has_target)),
    ("step", "--example", has_example),
    ("example", "--workdir", args.workdir is not None),
    ("example", "no --target", not has_target),
  ):
    if args[name].present and not is_given:
      raise ValueError(f"--{name} requires {needed}")


def _draw_heads(args):
  """Draws what the heads of a run attend to, and prints their statistics."""
  import jax

  from sparse_transformer.training import kernel_check
  from sparse_transformer.training.experiment import open_run
  from sparse_transformer.training.reports import head_statistics

  run = open_run(args.workdir, cli.overrides(in_float32=True), args.step)
  experiment = run.experiment
  kernel_check.avoid_wrong(experiment)
  model = experiment.model

  examples = experiment.source.examples("test")
  if args.example >= len(examples):
    raise ValueError(
      f"--example={args.example} must be less than {len(examples)}, the number"
      " of examples in the test split"
    )

  # --example=3 is an index into the run's own data, so the data must be the
  # same as in training.
  state = run.restore(with_data=True)
  # Remove padding, and the label and size at the end of a labelled row.
  tokens = examples[args.example]
  tokens = tokens[: tokens[-1]] if model.classifies else tokens[tokens >= 0]

  # On several devices, kernels need the mesh.
  folder = args.out or str(pathlib.Path(args.workdir) / "attention")
  with jax.set_mesh(experiment.mesh):
    report = head_statistics.draw(
      model,
      state.ema,
      tokens,
      folder,
      step=run.step,
      example=args.example,
      command=version.command(step=run.step),
    )
  _print(args, report, head_statistics.render(report), folder)


def _explain(args):
  """Prints what an experiment costs and what its positions see.

  Also draws its patterns.
  """
  from sparse_transformer.figures import masks
  from sparse_transformer.training import banner, costs, rematerialization
  from sparse_transformer.training.experiment import Experiment
  from sparse_transformer.training.reports import network_report

  experiment = Experiment(args.config)
  model = experiment.model

  banner.warn(experiment)
  report = network_report.describe(experiment.config, model)
  if args.compile:
    # This compiles for the devices of this machine, which takes as long as
    # compilation at the start of a run.
    sizes = experiment.mesh.shape
    state = costs.bytes_on_device(experiment.like, sizes)
    step = rematerialization.choose(experiment, state=state)
    memory = step.program.memory_analysis()
    parts = dict(
      arguments=memory.argument_size_in_bytes,
      temporaries=memory.temp_size_in_bytes,
    )
    compiled = parts | dict(total=sum(parts.values()))
    report = dataclasses.replace(
      report, compiled=compiled, remat=step.why or report.remat
    )

  # The folder of the pictures is named after the run or the config file.
  path = args.workdir or config_flags.get_config_filename(args["config"])
  resolved = pathlib.Path(path).resolve()
  name = resolved.name if args.workdir else resolved.stem
  folder = pathlib.Path(args.out or f"explain/{name}")
  # Print first, because drawing the pictures may fail.
  text = network_report.render(report)
  _print(args, dataclasses.asdict(report), text, folder)
  folder.mkdir(parents=True, exist_ok=True)
  picture = folder / "patterns.png"
  masks.save_patterns(picture, model.patterns, model.shape, model.length)


def _print(args, report, text, folder):
  """Prints a report as JSON, or as text followed by the pictures' folder."""
  line = json.dumps(report) if args.json else f"{text}\n\npictures in {folder}"
  print(line, flush=True)


def _compile(args):
  """Compiles for absent devices, and prints a report.

  Raises ValueError if a program does not compile or does not fit.
  """
  from sparse_transformer.targets import compilers, hardware
  from sparse_transformer.training.distributed import mesh

  target = hardware.parse(args.target)
  config = schema.typed(args.config)

  # Check that the mesh divides all sizes before minutes of compilation.
  sizes = mesh.sizes(config, target.num_devices)
  mesh.check_batch(config, sizes)
  report = compilers.compile_for(target, config, args.part)
  print(json.dumps(report) if args.json else compilers.render(report))
  # An error sets exit status 1, so that scripts can detect it.
  if not all(x["compiles"] and x["fits"] for x in report["programs"]):
    raise ValueError(f"{target}: not every program compiles and fits")


if __name__ == "__main__":
  flags.DEFINE_string(
    "out",
    None,
    "Folder for the pictures; default: explain/NAME, named after the config"
    " file or the run, or WORKDIR/attention with --example.",
  )
  flags.DEFINE_bool("json", False, "Prints one JSON object instead of tables.")
  flags.DEFINE_bool(
    "compile",
    False,
    "Also compiles the training step, and prints the memory that it needs.",
  )
  flags.DEFINE_string(
    "target",
    None,
    "Devices to compile for, such as h100 or h100:1x1x8; list prints all.",
  )
  flags.DEFINE_enum(
    "part", "step", ["step", "attention"], "What to compile for the target."
  )
  flags.DEFINE_integer(
    "example", None, "Draws heads on the test example with this index.", 0
  )
  flags.DEFINE_string(
    "step", None, "Checkpoint to read: a step, or best; default: the last."
  )
  cli.run(main, cli.on_either)
