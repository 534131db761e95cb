"""Times torch's FlexAttention on an NVIDIA GPU, for the part `attention`.

In a separate process: JAX and torch do not share memory well.
"""

import json
import sys

import torch
from torch.nn.attention import flex_attention as flex_lib

from benchmarks.accelerator import timing
from sparse_transformer import patterns


def passes(request):
  ((pattern,),) = patterns.parse(request["text"])
  n, dtype = request["n"], getattr(torch, request["dtype"])
  # Compiled: otherwise it takes several arrays of n x n int64.
  block_mask = torch.compile(flex_lib.create_block_mask)(
    lambda b, h, q, k: pattern.mask(q, k), None, None, n, n, device="cuda"
  )
  attend = torch.compile(flex_lib.flex_attention, dynamic=False)
  shape = request["batch"], request["heads"], n, request["width"]
  torch.manual_seed(0)
  inputs = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4)]
  *qkv, dout = inputs
  for x in qkv:
    x.requires_grad_()

  @torch.no_grad()
  def forward():
    attend(*qkv, block_mask=block_mask)

  def forward_backward():
    torch.autograd.grad(attend(*qkv, block_mask=block_mask), qkv, dout)

  return {"forward": forward, "forward_backward": forward_backward}


def main():
  found = {}
  wait = lambda _: torch.cuda.synchronize()
  for name, run in passes(json.loads(sys.argv[1])).items():
    try:
      warm = timing.warm_up(run, wait)
      found |= timing.interleave({name: run}, {name: warm}, wait)
    except Exception as error:
      found["failed"] = " ".join(str(error).split())[:300]
  print(json.dumps(found))


if __name__ == "__main__":
  main()
