"""The zoo: every model is one graph without any memory, and learns; and the user's own models."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from planner import zoo
from planner.capture import fake_mode
from planner.capture.inputs import Inputs
from planner.capture.joint_capture import capture
from planner.errors import UsageError
from tests.tiers import tiered

OF_TOKENS = (
    "minigpt", "minimind-26m", "minimind-104m", "gpt2", "gpt2-774m", "llama-7b", "bert-large", "t5-base", "mixtral-1b",
    "qwen3-0.6b", "gemma3-1b",
)  # fmt: skip
OF_IMAGES = ("vit-b16", "resnet50", "resnet152", "unet", "convnext-tiny", "convnext-base")
SMALL = {
    **{name: {"seq_len": 16} for name in OF_TOKENS},
    **{name: {"image_size": 32} for name in OF_IMAGES},
    "whisper-small-encoder": {"seq_len": 32},
}
REAL = (
    "minigpt", "minimind-26m", "gpt2", "bert-large", "vit-b16", "resnet50", "t5-base", "unet", "convnext-tiny",
    "whisper-small-encoder",
)  # fmt: skip
"""One of each family that a test can afford; a LLaMA with one layer still takes gigabytes."""

LARGER = ("minimind-104m", "gpt2-774m", "resnet152", "convnext-base")
"""What differs from another model of the zoo in sizes alone, so that the other's graph is like it."""


def build(name, **options):
    if "transformers" in zoo.describe(name):
        pytest.importorskip("transformers")
    return zoo.build(name, batch_size=2, **{"layers": 1, **SMALL[name], **options})


def parameters(example) -> int:
    return sum(parameter.numel() for parameter in example.model.parameters())


def loss_of(example):
    output = example.model(*example.example_args, **example.example_kwargs)
    return getattr(output, "loss", output)


def test_every_model_is_tested():
    assert set(SMALL) == set(zoo.names())


CAPTURED_ELSEWHERE = ("minigpt", "minimind-26m", "gpt2", "bert-large", "resnet50", "t5-base")
"""What quick tests of other rooms capture too: of the README's commands, of blocks, of tensor parallelism."""

ALIKE = ("diffusion-unet", "qwen3-0.6b", "gemma3-1b")
"""What is built much as another model: a U-Net, and decoders like LLaMA."""


@pytest.mark.parametrize("name", tiered(zoo.names(), slow=[*LARGER, *CAPTURED_ELSEWHERE, *ALIKE]))
def test_model_is_one_graph_under_fake_tensors(name):
    example = build(name, fake_mode=fake_mode())
    graph = capture(example.model, Inputs.of(example.example_args, example.example_kwargs)).graph
    targets = {str(node.target) for node in graph.nodes}
    assert targets & {"aten.mm.default", "aten.addmm.default", "aten.convolution.default"}
    gradients = [node for node in graph.output_node().args[0] if node is not None]
    assert len(gradients) > sum(1 for p in example.model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("name", "ambient"),
    tiered(
        product(zoo.names(), (False, True)),
        quick=[*((name, False) for name in zoo.names()), *((name, True) for name in ("minigpt", "gpt2", "resnet50"))],
    ),
)
def test_full_size_costs_no_memory_and_leaves_no_trace(name, ambient):
    if "transformers" in zoo.describe(name):
        pytest.importorskip("transformers")
    before = torch.get_rng_state(), torch.get_default_dtype()
    mode = FakeTensorMode()
    if ambient:
        with mode:
            example = zoo.build(name)
    else:
        example = zoo.build(name, fake_mode=mode)
    tensors = (*example.model.parameters(), *example.model.buffers(), *example.example_kwargs.values())
    assert all(isinstance(tensor, FakeTensor) and tensor.fake_mode is mode for tensor in tensors)
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.get_default_dtype() == before[1]
    millions = zoo.describe(name).split(" parameters")[0].split()[-1]
    published = float(millions[:-1]) * (1e9 if millions.endswith("B") else 1e6)
    assert parameters(example) == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("name", tiered(REAL, slow=["minimind-26m", "gpt2", "t5-base", "bert-large"]))
def test_model_learns(name):
    example = build(name)
    torch.manual_seed(0)
    first = loss_of(example)
    first.backward()
    torch.optim.SGD(example.model.parameters(), lr=0.1).step()
    assert first.ndim == 0
    torch.manual_seed(0)  # the same dropout, so that only the weights differ
    assert loss_of(example).item() < first.item() < 12


def test_llama_steps_in_bfloat16():
    mode = FakeTensorMode()
    example = build("llama-7b", fake_mode=mode)
    with mode:
        loss_of(example).backward()
    assert {parameter.grad.dtype for parameter in example.model.parameters()} == {torch.bfloat16}


def test_same_seed_same_model_and_inputs():
    first, same, other = (build("minimind-26m", seed=seed) for seed in (3, 3, 4))
    weight, same_weight, other_weight = (one.model.get_input_embeddings().weight for one in (first, same, other))
    assert torch.equal(weight, same_weight) and not torch.equal(weight, other_weight)
    assert torch.equal(first.example_kwargs["labels"], same.example_kwargs["labels"])


def test_sizes_are_kept():
    example = build("minigpt", layers=2, seq_len=8, dtype=torch.bfloat16)
    assert example.example_kwargs["input_ids"].shape == (2, 8)
    assert len(example.model.blocks) == 2
    assert {parameter.dtype for parameter in example.model.parameters()} == {torch.bfloat16}
    assert example.model.head.weight is example.model.tokens.weight
    assert example.model.training and example.loss_fn is None


CONFIGURATIONS = {
    "Llama": {"max_position_embeddings": 64, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"},
    "GPT2": {"n_positions": 64, "architectures": ["GPT2LMHeadModel"]},
    "Bert": {"architectures": ["BertModel"]},
    "ViT": {"image_size": 32, "architectures": ["ViTForImageClassification"]},
}


@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_a_configuration_is_a_model(family, tmp_path, recwarn):
    hf = pytest.importorskip("transformers")
    widths = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    getattr(hf, f"{family}Config")(**widths, **CONFIGURATIONS[family]).save_pretrained(tmp_path)
    name = f"hf:{tmp_path / 'config.json'}"
    sizes = {} if family == "ViT" else {"seq_len": 48}
    example = zoo.build(name, batch_size=2, layers=1, fake_mode=(mode := FakeTensorMode()), **sizes)
    assert example.name == name and example.model.config.num_hidden_layers == 1
    assert example.model.dtype == (torch.bfloat16 if family == "Llama" else torch.float32)
    with mode:
        assert loss_of(example).ndim == 0
    assert loss_of(zoo.build(f"hf:{tmp_path}", batch_size=1, **sizes)).isfinite()
    with pytest.raises(UsageError, match=r"at most \d+ tokens .*: seq_len 999 is too long|has no seq_len"):
        zoo.build(name, seq_len=999)


def test_every_sixth_layer_of_gemma_sees_all_tokens():
    pytest.importorskip("transformers")
    mode = FakeTensorMode()
    config = build("gemma3-1b", layers=6, fake_mode=mode).model.config
    assert config.layer_types == 5 * ["sliding_attention"] + ["full_attention"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt-2", {}, "did you mean gpt2"),
        ("zzzz", {}, "known are minigpt"),
        ("gpt2", {"image_size": 224}, "no image_size"),
        ("resnet50", {"seq_len": 8}, "no seq_len"),
        ("gpt2", {"batch_size": 0}, "batch_size of model 'gpt2' must be a whole number above zero"),
        ("gpt2", {"layers": 1.5}, "layers of model 'gpt2'"),
        ("gpt2", {"dtype": "int8"}, "choose one of float32"),
        ("vit-b16", {"image_size": 100}, "multiple"),
        ("convnext-tiny", {"image_size": 16}, "too small"),
        ("whisper-small-encoder", {"seq_len": 31}, "not even"),
        ("bert-large", {"seq_len": 513}, r"at most 512 tokens \(max_position_embeddings\): seq_len 513 is too long"),
        ("hf:acme/absent", {}, "not on this machine, and nothing is downloaded: 'hf download acme/absent config.json'"),
    ],
)
def test_what_cannot_be_built_says_why(name, options, message):
    with pytest.raises(UsageError, match=message) as caught:
        zoo.build(name, **options)
    assert "\n" not in str(caught.value)


def test_missing_transformers_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install checkpoint-planner\[zoo\]"):
        zoo.build("gpt2")


# --- the user's own models ------------------------------------------------------------------------

SOURCE = (Path(__file__).parent / "user_models.txt").read_text()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "helper.py").write_text("WIDTH = 4\n")
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "script.py").write_text("raise SystemExit(2)\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("mine", "helper", "broken", "script"):
        sys.modules.pop(name, None)
        sys.modules.pop(f"_planner_model_{name}", None)


@pytest.mark.parametrize("place", ["mine.py", "mine"])
@pytest.mark.parametrize("factory", ["tensor", "arguments", "keywords", "with_loss"])
def test_user_model_is_loaded(folder, place, factory):
    path_before = list(sys.path)
    example = zoo.load_user_model(f"{place}:{factory}")
    output = example.model(*example.example_args, **example.example_kwargs)
    assert output.shape == (1, 2)
    assert (example.loss_fn is not None) == (factory == "with_loss")
    assert sys.path == path_before
    for name, sizes in (("Alone", {"batch_size": 3}), ("alone", {})):
        example = zoo.load_user_model(f"{place}:{name}", sizes=sizes, fake_mode=FakeTensorMode())
        assert example.example_args[0].shape == (sizes.get("batch_size", 1), 4) and example.loss_fn is not None
        assert isinstance(example.model.weight, FakeTensor) == (name == "Alone")


def test_user_model_by_absolute_path_under_fake_tensors(folder):
    code = "import torch\ndef make(): return torch.nn.Linear(2**20, 2**20), torch.empty(1, 2**20)"
    (folder / "big.py").write_text(code)
    example = zoo.load_user_model(f"{folder / 'big.py'}:make", fake_mode=FakeTensorMode())
    assert isinstance(example.model.weight, FakeTensor)


@pytest.mark.parametrize(
    ("specification", "message"),
    [
        ("mine", "cannot read model 'mine': write path/to/file.py:factory"),
        ("mine.py:", "cannot read model"),
        (":tensor", "cannot read model"),
        ("other.py:tensor", "there is no file 'other.py'"),
        ("other:tensor", "cannot import 'other' .*No module named 'other'"),
        ("broken.py:tensor", "No module named 'nothing_of_this_name'"),
        ("script.py:tensor", "SystemExit: 2"),
        ("mine.py:tenser", "has no function 'tenser': did you mean tensor"),
        ("mine.py:not_a_function", "has no function 'not_a_function'"),
        ("mine.py:raises", "failed: RuntimeError: no;"),
        ("mine.py:leaves", "failed: SystemExit"),
        ("mine.py:needs", "failed: TypeError: .*argument"),
        ("mine.py:just_model", "it returned a Linear alone, with no example_inputs"),
        ("mine.py:many", "it returned a tuple of 4"),
        ("mine.py:no_model", "the model is a Tensor"),
        ("mine.py:no_inputs", "the example inputs are an int"),
        ("mine.py:bad_names", "the example inputs are a dict"),
        ("mine.py:bad_loss", "the loss function is a str"),
    ],
)
def test_bad_user_model_says_what_is_wrong(folder, specification, message):
    with pytest.raises(UsageError, match=message) as caught:
        zoo.load_user_model(specification)
    assert "\n" not in str(caught.value)
