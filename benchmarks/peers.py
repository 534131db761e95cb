"""The process that runs torch and the other peers, on a CPU."""

import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as flex_lib

from benchmarks import worker
from sparse_transformer import patterns

torch.set_num_threads(worker.num_threads())


def sdpa(entry):
  if entry.pattern != "Causal()":
    raise ValueError(f"sdpa runs Causal() only, not {entry.pattern}")
  run = functools.partial(F.scaled_dot_product_attention, is_causal=True)
  return _contestant(entry, run)


def flex(entry):
  """Returns FlexAttention, forward only: it has no backward pass on CPUs."""
  attend = torch.compile(flex_lib.flex_attention, dynamic=False)
  pattern, n = worker.pattern_of(entry), entry.n
  mask = lambda b, h, q, k: pattern.mask(q, k)
  if entry.documents:
    of = torch.from_numpy(worker.segments(entry))
    mask = lambda b, h, q, k: pattern.mask(q, k) & (of[q] == of[k])
  attend = functools.partial(
    attend,
    block_mask=flex_lib.create_block_mask(mask, None, None, n, n, device="cpu"),
    enable_gqa=entry.key_heads > 0,
  )
  return _contestant(entry, attend, backward=False)


def local_attention(entry):
  """Returns an attention like `Local`, but with one more key per query."""
  from local_attention import LocalAttention

  window = worker.pattern_of(entry).window
  layer = LocalAttention(
    window_size=window,
    causal=True,
    look_backward=1,
    exact_windowsize=True,
    autopad=True,
    use_rotary_pos_emb=False,
  )
  contestant = _contestant(entry, layer)
  return dataclasses.replace(contestant, pattern=patterns.Local(window + 1))


def _contestant(entry, attend, backward=True):
  """Returns a contestant for `attend`, (q_BHLK, k_BHLK, v_BHLE) -> out_BHLE."""
  inputs = map(torch.from_numpy, worker.random_inputs(entry))
  *qkv, dout = (x.transpose(1, 2).contiguous() for x in inputs)
  for x in qkv if backward else ():
    x.requires_grad_()

  @torch.no_grad()
  def forward():
    return (attend(*qkv),)

  def forward_backward():
    out = attend(*qkv)
    return out, *torch.autograd.grad(out, qkv, dout)

  passes = {"forward": forward}
  if backward:
    passes["forward_backward"] = forward_backward
  first = lambda x: x[0].detach().transpose(0, 1).double().numpy()
  return worker.Contestant(passes, first, facts={"temp_bytes": None})


if __name__ == "__main__":
  # Raise the limit, because all programs of a case must stay compiled.
  torch._dynamo.config.recompile_limit = 64
  packages = "torch", "local-attention", "numpy"
  worker.Worker((sdpa, flex, local_attention), packages).serve()
