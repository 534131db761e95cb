"""Tests of reading what the assembler says of kernels."""

import stat

from sparse_transformer.targets import kernels

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'forward' for 'sm_90a'
ptxas info    : Function properties for forward
    16 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 127 registers, used 1 barriers
"""
HLO = (
  '  %pallas_call.7 = f32[8]{0} custom-call(%x), custom_call_target="__gpu$xla'
  '.gpu.triton", metadata={op_name="jit(f)/jvp()/forward/pallas_call"}\n'
)
THUNKS = (
  "001: kCustomKernel [source | sink] forward grid: [384, 2, 1] threads:"
  " [128, 1, 1]  shared_memory: 41984 bytes\n"
  "002: kCustomKernel [source | sink] forward_1 grid: [9, 1, 1] threads:"
  " [256, 1, 1]  shared_memory: 64 bytes\n"
)
PTX = ".version 8.8\n.target sm_90a\n.visible .entry {name}(\n.reqntid 128\n"
# Two loops, a wait before the first one and a wait after the last one.
LOOPS = """
\tcp.async.wait_group \t1;
$L__BB0_2:
\tcp.async.wait_group \t{first};
\t@%p45 bra \t$L__BB0_2;
$L__BB0_3:
\t@%p46 bra \t$L__BB0_6;
$L__BB0_5:
\tcp.async.wait_group \t{second};
\tbra.uni \t$L__BB0_5;
$L__BB0_6:
\tcp.async.wait_group \t0;
"""


def test_registers_and_spills():
  log = LOG.format(stores=0, loads=0)
  assert kernels.parse_assembly(log) == dict(registers=127, spilled_bytes=0)
  log = LOG.format(stores=528, loads=176)
  assert kernels.parse_assembly(log)["spilled_bytes"] == 704


def test_hand_written_kernels_are_found(tmp_path):
  for name in ("forward", "forward_1", "loop_fusion", "forwarding"):
    (tmp_path / f"module.{name}.ptx").write_text(PTX.format(name=name))
  (tmp_path / "module.thunk_sequence.txt").write_text(THUNKS)
  assembler = tmp_path / "ptxas"
  log = LOG.format(stores=0, loads=0)
  assembler.write_text(f"#!/bin/sh\ncat >&2 <<EOF\n{log}EOF\n")
  assembler.chmod(assembler.stat().st_mode | stat.S_IXUSR)
  first, second = kernels.read(tmp_path, HLO, assembler)
  assert first == dict(
    kernel="forward",
    registers=127,
    spilled_bytes=0,
    shared_bytes=41984,
    grid="384, 2, 1",
    threads="128, 1, 1",
    copies_in_flight=None,
  )
  assert second["kernel"] == "forward_1" and second["shared_bytes"] == 64


def test_kernels_of_mosaic_gpu_are_found(tmp_path):
  log = LOG.format(stores=528, loads=176)
  (tmp_path / "forward_1.ptxas").write_text(log)
  resources = "Resources(smem_scratch_bytes=61440, tmem_scratch_cols=0)"
  (tmp_path / "forward_0.resources.txt").write_text(resources)
  (found,) = kernels.read(tmp_path, "ENTRY %main")
  assert found["kernel"] == "forward" and found["shared_bytes"] == 61440
  assert found["registers"] == 127 and found["spilled_bytes"] == 704


def test_copies_in_flight():
  for first, second in (5, 3), (2, 4), (0, 3):
    code = LOOPS.format(first=first, second=second)
    assert kernels.copies_in_flight(code) == min(first, second)


def test_program_without_hand_written_kernels(tmp_path):
  assert kernels.read(tmp_path, "ENTRY %main") == []
