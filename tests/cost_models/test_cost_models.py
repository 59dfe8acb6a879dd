"""Cost models: one contract for all that are found, and the arithmetic under them against torch's own."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass

import pytest

import cost_models
from cost_models import base, devices, flops
from cost_models.devices import DeviceSpec, UnknownNameError, device, device_names

torch = pytest.importorskip("torch")
aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The least that a cost model can ask for."""

    name: str = "mm"
    target: str = "aten.mm.default"
    flops: int = 2 * 512**3
    moved_bytes: int = 3 * 512**2 * 4
    dtype: str = "float32"
    signature: str = ""


def seconds(model, *operations: Call) -> list[float]:
    return [cost.seconds for cost in model.costs(operations)]


# --- the contract -------------------------------------------------------------------------------


@pytest.fixture(params=["cpu", "h100"])
def spec(request) -> DeviceSpec:
    return device(request.param)


@pytest.fixture(params=cost_models.names())
def model(request, spec):
    return cost_models.get(request.param)(spec)


OPERATIONS = (
    Call(),
    Call(name="add", target="aten.add.Tensor", flops=10_000, moved_bytes=120_000),
    Call(name="mask", target="aten.native_dropout.default", flops=10_000, moved_bytes=90_000, dtype="bfloat16"),
    Call(name="own", target="mylib.op.default", flops=0, moved_bytes=0, dtype="int64"),
)


def test_model_says_what_it_is(model, spec):
    assert model.name in cost_models.names()
    assert model.device == spec


def test_one_finite_cost_per_operation_in_order(model):
    costs = model.costs(OPERATIONS)
    assert isinstance(costs, tuple) and len(costs) == len(OPERATIONS)
    for cost in costs:
        assert isinstance(cost, base.OperationCost)
        assert math.isfinite(cost.seconds) and cost.seconds > 0
        assert isinstance(cost.workspace_bytes, int) and cost.workspace_bytes >= 0
    assert model.costs(OPERATIONS) == costs and model.costs(OPERATIONS[::-1]) == costs[::-1]
    assert model.costs(()) == ()


def test_more_work_never_costs_less(model):
    small, more_flops, more_bytes = seconds(model, Call(), Call(flops=10**15), Call(moved_bytes=10**13))
    assert small < more_flops
    assert small < more_bytes


# --- how cost models are found --------------------------------------------------------------------


def test_unknown_cost_model_lists_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean roofline"):
        cost_models.get("rooflin")


# --- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", device_names())
def test_device_figures_make_sense(name):
    spec = device(name)
    assert spec.name == name and spec.source
    assert spec.kind == ("cpu" if name == "cpu" else "cuda")
    assert spec.alignment_bytes == (64 if name == "cpu" else 512)
    assert 0 < spec.compute_efficiency <= 1 and 0 < spec.bandwidth_efficiency <= 1
    # A machine balance between 1 and 1,000 flops per byte: outside, a unit is wrong by a thousand.
    assert 1 <= spec.peak_flops_per_second("bfloat16") / spec.bandwidth_bytes_per_second < 1000
    assert spec.host_link_bytes_per_second <= spec.bandwidth_bytes_per_second
    assert spec.peak_flops_per_second("int64") == spec.peak_flops_per_second("float32")
    assert pickle.loads(pickle.dumps(spec)) == spec and hash(spec) == hash(device(name))
    assert asdict(spec)["flops_per_second"] == spec.flops_per_second
    with pytest.raises(FrozenInstanceError):
        spec.name = "other"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100", "h100"),
        ("RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA A100-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80-pcie"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10", "a10"),
        ("CPU", "cpu"),
    ],
)
def test_device_is_found_however_it_is_written(written, name):
    assert device(written).name == name


@pytest.mark.parametrize(("written", "hint"), [("a100", "a100-80"), ("h10", "h100"), ("zzz", "known are cpu")])
def test_unknown_device_lists_the_nearest(written, hint):
    with pytest.raises(UnknownNameError, match=hint):
        device(written)
    assert issubclass(UnknownNameError, ValueError)


def test_tf32_has_a_rate_of_its_own_where_there_is_one():
    assert device("a100-40").peak_flops_per_second("tf32") == 156e12
    assert device("mi300x").peak_flops_per_second("bfloat16") == 1307.4e12
    assert devices.cpu(2).peak_flops_per_second("tf32") == devices.cpu(2).peak_flops_per_second("float32")


# --- roofline -------------------------------------------------------------------------------------


def test_roofline_is_the_longer_of_arithmetic_and_traffic():
    spec = device("a100-80")
    compute, memory = seconds(
        cost_models.get("roofline")(spec),
        Call(flops=10**12, moved_bytes=0, dtype="bfloat16"),
        Call(flops=0, moved_bytes=10**9),
    )
    assert compute == pytest.approx(1e12 / (312e12 * spec.compute_efficiency) + spec.launch_seconds)
    assert memory == pytest.approx(1e9 / (2039e9 * spec.bandwidth_efficiency) + spec.launch_seconds)


@pytest.mark.parametrize(
    ("name", "dtype", "share"),
    [
        ("a100-80", "float32", 8 * 0.33),
        ("h100", "bfloat16", 0.55),
        ("mi300x", "float32", 1.0),
        ("cpu", "float32", 0.95),
    ],
)
def test_convolutions_reach_less_than_products_and_take_tf32_where_those_do_not(name, dtype, share):
    model = cost_models.get("roofline")(device(name))
    work = {"flops": 10**15, "moved_bytes": 0, "dtype": dtype}
    product, convolution = seconds(model, Call(**work), Call(target="aten.convolution.default", **work))
    assert product / convolution == pytest.approx(share, rel=0.01)


@pytest.mark.parametrize(
    ("name", "kernel", "forward_peta", "backward_peta"),
    [("h100", "flash", 0.35, 0.30), ("h100", "cudnn", 0.51, 0.46), ("a100-80", "flash", 0.22, 0.19)],
)
def test_attention_is_as_fast_as_published(name, kernel, forward_peta, backward_peta):
    target = f"aten._scaled_dot_product_{kernel}_attention"
    work = {"flops": 10**15, "moved_bytes": 0, "dtype": "bfloat16"}
    forward, backward = seconds(
        cost_models.get("roofline")(device(name)),
        Call(target=f"{target}.default", **work),
        Call(target=f"{target}_backward.default", **work),
    )
    assert (1 / forward, 1 / backward) == pytest.approx((forward_peta, backward_peta), rel=0.03)


def test_random_numbers_are_slow_on_a_cpu_however_many_cores():
    drop = Call(target="aten.native_dropout.default", flops=10**6, moved_bytes=9 * 10**6)
    add = Call(target="aten.add.Tensor", flops=10**6, moved_bytes=12 * 10**6)
    for cores in (1, 8):
        dropped, added = seconds(cost_models.get("roofline")(devices.cpu(cores)), drop, add)
        assert dropped > 5 * added
    assert dropped == pytest.approx(1e6 / 0.15e9, rel=0.01)


# --- flops against torch's counter ----------------------------------------------------------------


class CountCalls(torch.utils._python_dispatch.TorchDispatchMode):
    """Adds up what this project counts, by operator."""

    def __init__(self):
        super().__init__()
        self.flops = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        self.flops[packet] = self.flops.get(packet, 0) + flops.count_flops(func, args, kwargs or {}, output)
        return output


def step(module, *inputs):
    output = module(*inputs)
    output.sum().backward()


class MathAttention(torch.nn.Module):
    def forward(self, query, key, value):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class BatchedProduct(torch.nn.Module):
    def forward(self, a, b):
        return torch.baddbmm(a @ b, a, b)


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


MODULES = {
    "linear": lambda: (torch.nn.Linear(16, 24), leaf(4, 5, 16)),
    "linear without bias": lambda: (torch.nn.Linear(16, 24, bias=False), leaf(4, 16)),
    "conv": lambda: (torch.nn.Conv2d(3, 8, 3, stride=2, padding=1), leaf(2, 3, 16, 16)),
    "conv without gradient of the input": lambda: (torch.nn.Conv2d(3, 8, 5), torch.randn(2, 3, 16, 16)),
    "transposed conv": lambda: (torch.nn.ConvTranspose1d(4, 8, 3, stride=2), leaf(2, 4, 10)),
    "attention": lambda: (MathAttention(), leaf(2, 3, 16, 8), leaf(2, 3, 16, 8), leaf(2, 3, 16, 8)),
    "bmm": lambda: (BatchedProduct(), leaf(3, 4, 4), leaf(3, 4, 4)),
    "transformer": lambda: (torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), leaf(2, 8, 16)),
}


@pytest.mark.parametrize("name", MODULES)
def test_flops_equal_torchs_forward_and_backward(name):
    module, *inputs = MODULES[name]()
    with torch.utils.flop_counter.FlopCounterMode(display=False) as theirs:
        step(module, *inputs)
    with CountCalls() as ours:
        step(module, *inputs)
    expected = theirs.get_flop_counts()["Global"]
    assert expected
    assert {packet: ours.flops[packet] for packet in expected} == dict(expected)


def test_grouped_convolution_counts_its_groups_where_torch_does_not():
    module, x = torch.nn.Conv2d(8, 8, 3, groups=8, bias=False), leaf(2, 8, 6, 6)
    with CountCalls() as ours:
        step(module, x)
    one_way = 2 * (2 * 8 * 4 * 4) * 9
    assert ours.flops[aten.convolution] == one_way
    assert ours.flops[aten.convolution_backward] == 2 * one_way


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_flash_attention_of_the_cpu_counts_as_that_of_cuda(kv_heads):
    query, key, value = leaf(2, 4, 16, 8), leaf(2, kv_heads, 16, 8), leaf(2, kv_heads, 16, 8)
    product = 2 * (2 * 4) * 16 * 16 * 8
    with CountCalls() as ours:
        torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        ).sum().backward()
    assert ours.flops[aten._scaled_dot_product_flash_attention_for_cpu] == 2 * product
    assert ours.flops[aten._scaled_dot_product_flash_attention_for_cpu_backward] == 5 * product


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_fused_attention_counts_as_torch_does_and_grouped_heads_as_repeated_ones(kernel, kv_heads):
    forward = getattr(aten, f"_scaled_dot_product_{kernel}_attention")
    backward = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward")

    def tensors(heads):
        output, query = (torch.empty(2, 4, 16, size, device="meta") for size in (6, 8))
        return output, query, *(torch.empty(2, heads, 12, size, device="meta") for size in (8, 6))

    (output, *inputs), (_, *repeated) = tensors(kv_heads), tensors(4)
    registry = torch.utils.flop_counter.flop_registry
    assert flops.count_flops(forward, inputs, {}, output) == registry[forward](*repeated, out_val=output) > 0
    theirs = registry[backward](output, *repeated, out_val=repeated)
    assert flops.count_flops(backward, (output, *inputs), {}, inputs) == theirs > 0


def test_flops_of_what_has_no_formula_are_its_elements_and_views_are_free():
    x = torch.randn(4, 6)
    assert flops.count_flops(aten.exp.default, (x,), {}, x.exp()) == 24
    assert flops.count_flops(aten.native_dropout.default, (x, 0.5, True), {}, aten.native_dropout(x, 0.5, True)) == 24
    assert flops.count_flops(aten.view.default, (x, [24]), {}, x.view(24)) == 0
    assert flops.moved_bytes(aten.view.default, (x, [24]), {}, x.view(24)) == 0
    assert flops.moved_bytes(aten._unsafe_view.default, (x, [24]), {}, x.view(24)) == 0


@pytest.mark.parametrize("name", ["mm.dtype", "addmm.dtype", "bmm.dtype"])
def test_overloads_with_an_output_type_count_like_the_plain_ones(name):
    packet, overload = name.split(".")
    target = getattr(getattr(aten, packet), overload, None)
    if target is None:
        pytest.skip(f"this torch has no {name}")
    a, b = torch.empty(2, 4, 8, device="meta"), torch.empty(2, 8, 16, device="meta")
    if packet != "bmm":
        a, b = a[0], b[0]
    args = (torch.empty(16, device="meta"), a, b) if packet == "addmm" else (a, b)
    expected = 2 * 4 * 8 * 16 * (2 if packet == "bmm" else 1)
    assert flops.count_flops(target, (*args, torch.float32), {}, a @ b) == expected


# --- moved bytes ----------------------------------------------------------------------------------


def test_moved_bytes_read_each_storage_once():
    x = torch.randn(100)
    assert flops.moved_bytes(aten.mul.Tensor, (x, x), {}, x * x) == 800
    assert flops.moved_bytes(aten.mul.Tensor, (x[:50], x[50:]), {}, x[:50] * x[50:]) == 600
    assert flops.moved_bytes(aten.mul.Tensor, (x[:50], x[25:75]), {}, x[:50]) == 400 + 200


def test_moved_bytes_of_an_expanded_view_are_those_it_expands():
    row, x = torch.randn(64), torch.randn(100, 64)
    assert flops.moved_bytes(aten.add.Tensor, (row.expand(100, 64), x), {}, row + x) == 64 * 4 + 2 * 100 * 64 * 4


def test_moved_bytes_of_a_gather_are_what_it_gathers():
    table, index = torch.randn(1000, 64), torch.zeros(2, 3, dtype=torch.long)
    taken = 2 * 3 * 64 * 4
    embedded = aten.embedding(table, index)
    assert flops.moved_bytes(aten.embedding.default, (table, index), {}, embedded) == 2 * taken + 6 * 8
    assert flops.moved_bytes(aten.index.Tensor, (table, [index]), {}, table[index]) == 2 * taken + 6 * 8


def test_moved_bytes_skip_what_only_lends_its_shape():
    x = torch.randn(100)
    assert flops.moved_bytes(aten.zeros_like.default, (x,), {}, torch.zeros_like(x)) == 400


def test_symbolic_sizes_are_counted_by_their_hints_and_add_no_guard():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    a = mode.from_tensor(torch.randn(12, 8), symbolic_context=dynamic)
    with mode:
        b = torch.empty(8, 16)
        product = a @ b
    before = len(shapes.guards)
    assert flops.count_flops(aten.mm.default, (a, b), {}, product) == 2 * 12 * 8 * 16
    assert flops.moved_bytes(aten.mm.default, (a, b), {}, product) == 4 * (12 * 8 + 8 * 16 + 12 * 16)
    assert flops.count_flops(aten.exp.default, (a,), {}, a) == 96
    assert len(shapes.guards) == before
