"""Times torch's FlexAttention on an NVIDIA GPU, for the part `attention`.

In a separate process: JAX and torch do not share memory well.
"""

import json
import sys

import torch

from benchmarks import peers, timing
from benchmarks.worker import Entry


def main():
  found, entry = {}, Entry(**json.loads(sys.argv[1]))
  wait = lambda _: torch.cuda.synchronize()
  for name, run in peers.flex(entry, "cuda").passes.items():
    try:
      warm = timing.warm_up(run, wait)
      found |= timing.interleave({name: run}, {name: warm}, wait)
    except Exception as error:
      found["failed"] = " ".join(str(error).split())[:300]
  print(json.dumps(found))


if __name__ == "__main__":
  main()
