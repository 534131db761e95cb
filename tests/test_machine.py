"""Tests of machine.py: the memory that a process can use."""

import jax
import pytest

from sparse_transformer import machine

GIB = 2**30


@pytest.fixture
def limits(tmp_path, monkeypatch):
  """Sets files of the operating system: {path: text}, below an empty folder."""

  def write(**files):
    for name, text in files.items():
      path = tmp_path / name.replace("__", "/")
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text)

  monkeypatch.setattr(machine, "memory", machine.memory.__wrapped__)
  monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
  monkeypatch.setattr(machine, "CGROUPS", tmp_path / "groups")
  monkeypatch.setattr(
    machine.os, "sysconf", {"SC_PHYS_PAGES": 2**22, "SC_PAGE_SIZE": 4096}.get
  )
  return write


def test_memory_is_what_the_machine_has_with_swap(limits):
  assert machine.memory() == 16 * GIB
  limits(
    proc__meminfo=f"MemTotal: 1 kB\nSwapTotal:  {2**20} kB\nSwapFree: 0 kB\n"
  )
  assert machine.memory() == 17 * GIB


def test_memory_is_the_lowest_limit_of_the_control_groups(limits):
  limits(
    proc__self__cgroup="0::/jobs/5\n",
    **{
      "groups/jobs/5/memory.max": "max\n",
      "groups/jobs/memory.max": f"{2 * GIB}\n",
      "groups/memory.max": f"{3 * GIB}\n",
    },
  )
  assert machine.memory() == 2 * GIB


def test_memory_is_limited_by_control_groups_of_version_1(limits):
  limits(
    proc__self__cgroup="5:cpu:/jobs\n4:memory:/jobs/5\n1:name=systemd:/\n",
    # In a container, which does not show its own path.
    **{"groups/memory/memory.limit_in_bytes": f"{GIB}\n"},
  )
  assert machine.memory() == GIB


def test_cpu_device_can_use_the_memory_of_the_machine(monkeypatch):
  monkeypatch.setattr(jax, "local_device_count", lambda: 4)
  assert machine.device_memory() == machine.memory()
