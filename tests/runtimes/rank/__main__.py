"""Runs scenarios one after the other, each the function of its name, on one rank: see ``test_distributed.py``."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import ChainMap
from pathlib import Path

import torch
import torch.distributed as dist

from tests.runtimes.rank import data_parallel, divided

SCENARIOS = ChainMap(*map(vars, (data_parallel, divided)))


def main() -> None:
    names, folder = sys.argv[1].split(","), Path(sys.argv[2])
    torch.set_num_threads(1)
    torch._dynamo.config.run_gc_after_compile = False
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=int(os.environ["WORLD_SIZE"])
    )
    for name in names:
        gc.collect()
        gc.freeze()  # what is imported, and what earlier ones left: each of the many collections to come would walk it
        (folder / f"{name}.{rank}.json").write_text(json.dumps(SCENARIOS[name](rank)), encoding="utf-8")
    if "dies" in names:
        os._exit(0)  # gloo still waits for the rank that is gone, and at times aborts at an exit ("terminate called")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
