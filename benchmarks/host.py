"""What does a step without recompute take of the host, beside eager's? Models of many small operations.

Processor time of the whole process is counted, of forward and backward. On a CPU the kernels are part of it, on tensors
of a few numbers. Under stand-ins for a GPU (``tests/cuda/fakecuda``) kernels do nothing, so all of it is the host's.
Results of each device and torch stand beside each other. Exit code 1 if a step takes over 1.05 of eager's.
"""

from __future__ import annotations

import copy
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import planner
from benchmarks import common
from benchmarks.common import Result
from benchmarks.steps import step_of
from planner.common.options import grouped
from planner.zoo import ZooModel

GOAL = 1.05
STEPS = 5
"""In a row, of each way in turn."""
WIDTH, TOKENS, LENGTH = 32, 64, 8


class _Residual(nn.Module):
    """Two convolutions with batch norms beside a shortcut."""

    def __init__(self, taken: int, given: int, stride: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv2d(taken, given, 3, stride, 1, bias=False),
            nn.BatchNorm2d(given),
            nn.ReLU(inplace=True),
            nn.Conv2d(given, given, 3, 1, 1, bias=False),
            nn.BatchNorm2d(given),
        )
        shortcut = (nn.Conv2d(taken, given, 1, stride, bias=False), nn.BatchNorm2d(given))
        self.beside = nn.Sequential(*shortcut) if taken != given else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inside(x) + self.beside(x))


class _Scan(nn.Module):
    """A selective scan in a loop, as state-space models have it without their kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decay = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        taken = self.into(self.norm(x))
        pace = nn.functional.softplus(taken)
        state, states = torch.zeros_like(taken[:, 0]), []
        for at in range(x.shape[1]):
            state = state * torch.exp(-pace[:, at] * self.decay.exp()) + taken[:, at]
            states.append(state)
        return x + self.out(nn.functional.silu(torch.stack(states, 1)))


def _plain(model: nn.Module, *sizes: int) -> ZooModel:
    return ZooModel(name="", model=model.train(), example_args=(torch.randn(sizes),), loss_fn=torch.sum)


def _resnet() -> ZooModel:
    widths = [4, 4, 8, 8, 16, 16, 32, 32]
    blocks = [_Residual(a, b, 1 + (a != b)) for a, b in zip([4, *widths], widths, strict=False)]
    first = (nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    return _plain(nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(32, 4)), 2, 3, 8, 8)


def _perceptrons(count: int) -> ZooModel:
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1)) for _ in range(count))
    return _plain(nn.Sequential(*blocks), 2, 8)


def _text(kind: str, model: str, **options: Any) -> ZooModel:
    import transformers

    config = getattr(transformers, f"{kind}Config")(vocab_size=TOKENS, bos_token_id=0, eos_token_id=0, **options)
    ids = torch.randint(TOKENS, (1, LENGTH))
    made = getattr(transformers, f"{kind}{model}")(config).train()
    return ZooModel(name="", model=made, example_kwargs={"input_ids": ids, "labels": ids})


_SIZES = {"hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": 2 * WIDTH}
MODELS: dict[str, Callable[[], ZooModel]] = {
    "gpt2, 12 layers": partial(
        _text, "GPT2", "LMHeadModel", n_layer=12, n_embd=WIDTH, n_head=2, n_positions=LENGTH, use_cache=False
    ),
    "bert, 12 layers": partial(_text, "Bert", "ForMaskedLM", num_hidden_layers=12, **_SIZES),
    "llama, 8 layers": partial(_text, "Llama", "ForCausalLM", num_hidden_layers=8, use_cache=False, **_SIZES),
    "resnet, 8 blocks": _resnet,
    "scan, 4 layers of 16 steps": lambda: _plain(nn.Sequential(*(_Scan() for _ in range(4))), 2, 16, WIDTH),
    "perceptrons, 20 layers": partial(_perceptrons, 20),
    "perceptrons, 2 layers": partial(_perceptrons, 2),
}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("host", __doc__)
    parser.add_argument("--rounds", metavar="N", type=int, default=40, help=f"of {STEPS} steps each way (default: 40)")
    args = parser.parse_args(arguments)
    common.check_destination(args.json)
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = {**common.environment("host", arguments), "rows": []}
    under = [torch.__version__, torch.cuda.get_device_name() if device.type == "cuda" else "CPU"]
    with suppress(FileNotFoundError):
        rows = json.loads(Path(args.json).read_text(encoding="utf-8"))["rows"]
        result["rows"] += [row for row in rows if row["under"] != under]
    for name, make in MODELS.items():
        torch.manual_seed(0)
        row = {"under": under, "model": name, **compared(make(), device, args.rounds)}
        result["rows"].append(row)
        common.progress(", ".join(f"{key} {value}" for key, value in row.items()))
        common.write(args.json, result, _markdown(result))
    return 1 if any(row["ratio"] > GOAL for row in result["rows"]) else 0


def compared(loaded: ZooModel, device: torch.device, rounds: int) -> Result:
    """Count what eager steps and those of a model without recompute take, in turn.

    Each way has a model of its own: a call that is put in and taken out makes Dynamo look at the whole model again.
    """
    args, kwargs = tree_map_only(torch.Tensor, lambda x: x.to(device), (loaded.example_args, loaded.example_kwargs))
    models = [loaded.model.to(device), copy.deepcopy(loaded.model).to(device)]
    options: Result = {"budget": sys.maxsize, "runtime": "graph", "time_limit_seconds": 1.0}
    planner.auto_wrap(models[1], **grouped(**options))
    ways = [
        step_of(ZooModel(name="", model=model, example_args=args, example_kwargs=kwargs, loss_fn=loaded.loss_fn))
        for model in models
    ]
    for step in ways * 2:
        step()
    gc.collect()
    seconds: list[list[float]] = [[] for _ in ways]
    order = list(range(len(ways)))
    for _ in range(rounds):
        random.shuffle(order)
        for way in order:
            ways[way]()
            models[way].zero_grad()
            took = 0.0
            for _ in range(STEPS):
                before = time.process_time()
                ways[way]()
                took += time.process_time() - before
                models[way].zero_grad()
            seconds[way].append(took / STEPS)
    planner.unwrap(models[1])
    eager, planned = seconds
    ratio = median(b / a for a, b in zip(eager, planned, strict=True))
    return {"eager_seconds": median(eager), "seconds": median(planned), "ratio": ratio}


def _markdown(result: Result) -> str:
    parts = ["Processor time of a step, forward and backward. Kernels of stand-ins for a GPU do nothing."]
    for under in dict.fromkeys(tuple(row["under"]) for row in result["rows"]):
        mine = [row for row in result["rows"] if tuple(row["under"]) == under]
        device = "CPU" if under[1] == "CPU" else f"stand-ins for {under[1]}"
        parts.append(f"## torch {under[0]}, {device}")
        cells = [
            [r["model"], f"{1e3 * r['eager_seconds']:.2f}", f"{1e3 * r['seconds']:.2f}", f"{r['ratio']:.3f}"]
            for r in mine
        ]
        parts.append(common.table(["", "eager, ms", "without recompute", "ratio"], cells))
    return common.page("Host time of a step", result, *parts)


if __name__ == "__main__":
    sys.exit(common.run(main))
