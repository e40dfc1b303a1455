"""Packed float32 layers: the same function as nn.Linear, whatever happens to the model around them."""

import copy

import pytest
import torch
from torch import nn

from quant_bench.lowbit import floats
from quant_bench.lowbit.floats import PackedLinear, pack_float_linears_, pack_weight
from quant_bench.lowbit.memory import tune_allocator

pytestmark = pytest.mark.skipif(not floats.packing_works(), reason="oneDNN's packed layout is not available")


@pytest.mark.parametrize("tokens", [1, 7, 600])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_layer_computes_what_the_plain_one_does(tokens, bias):
    linear = nn.Linear(65, 33, bias=bias)
    packed = PackedLinear(linear.weight, linear.bias)
    x = torch.randn(2, tokens, 65)
    assert torch.allclose(packed(x), linear(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(packed.weight, linear.weight)
    assert not packed(x).requires_grad


def test_integer_valued_products_are_exact_in_any_order():
    weight = torch.randint(-127, 128, (33, 130)).float()
    x = torch.randint(-127, 128, (9, 130)).float()
    packed = pack_weight(weight)
    assert packed is not None
    assert torch.equal(floats.packed_product(x, packed).double(), x.double() @ weight.double().t())


def test_other_dtypes_and_empty_inputs_take_the_plain_product():
    linear = nn.Linear(8, 4)
    packed = PackedLinear(linear.weight, linear.bias)
    x = torch.randn(3, 8)
    assert torch.equal(packed(x.double()), linear.double()(x.double()))
    assert packed(x[:0]).shape == (0, 4)


def test_a_tied_head_is_packed_and_the_embedding_keeps_its_storage():
    model = nn.Module()
    model.embedding = nn.Embedding(20, 8)
    model.head = nn.Linear(8, 20, bias=False)
    model.head.weight = model.embedding.weight
    model.other = nn.Linear(8, 8)
    address, before = model.embedding.weight.data_ptr(), model.embedding.weight.detach().clone()
    assert pack_float_linears_(model, skip=("other",)) == ["head"]
    assert model.embedding.weight.data_ptr() == address
    assert torch.equal(model.embedding.weight, before)
    assert type(model.other) is nn.Linear
    x = torch.randn(3, 8)
    assert torch.allclose(model.head(x), x @ before.t(), rtol=1e-5, atol=1e-5)


def test_subclasses_and_other_dtypes_are_left_alone():
    class Special(nn.Linear):
        pass

    model = nn.Sequential(Special(4, 4), nn.Linear(4, 4).half())
    assert pack_float_linears_(model) == []


def _hooked(linear: nn.Linear) -> None:
    linear.register_forward_pre_hook(lambda _, given: (given[0].round(),))


def _with_output(linear: nn.Linear) -> None:
    linear.register_forward_hook(lambda _, given, out: out.round())


def _with_forward(linear: nn.Linear) -> None:
    plain = linear.forward
    linear.forward = lambda x: plain(x).round()


def _with_part(linear: nn.Linear) -> None:
    linear.rounding = nn.Identity()


@pytest.mark.parametrize("change", [_hooked, _with_output, _with_forward, _with_part])
def test_a_layer_that_is_more_than_its_product_is_left_alone(change):
    model = nn.Sequential(nn.Linear(8, 4))
    change(model[0])
    x = torch.randn(3, 8)
    before = model(x)
    assert pack_float_linears_(model) == []
    assert torch.equal(model(x), before)


def test_a_state_without_the_weight_or_with_another_shape_is_refused():
    packed = PackedLinear(torch.randn(4, 8), None)
    before = packed.weight
    with pytest.raises(RuntimeError, match="Missing key"):
        packed.load_state_dict({})
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        packed.load_state_dict({"weight": torch.randn(8, 4)})
    assert torch.equal(packed.weight, before)


def test_copies_and_loaded_states_compute_the_same():
    one, two = (nn.Sequential(nn.Linear(8, 4)) for _ in range(2))
    pack_float_linears_(one)
    pack_float_linears_(two)
    x = torch.randn(3, 8)
    assert torch.equal(copy.deepcopy(one)(x), one(x))
    plain = nn.Sequential(nn.Linear(8, 4))
    plain.load_state_dict(one.state_dict())
    assert torch.allclose(plain(x), one(x), rtol=1e-5, atol=1e-6)
    two.load_state_dict(one.state_dict())
    assert torch.equal(two(x), one(x))


def test_without_the_operators_nothing_is_replaced(monkeypatch):
    monkeypatch.setattr(floats, "packing_works", lambda: False)
    model = nn.Sequential(nn.Linear(4, 4))
    assert pack_float_linears_(model) == []
    assert pack_weight(model[0].weight) is None
    with pytest.raises(RuntimeError, match=r"keep the nn\.Linear"):
        PackedLinear(model[0].weight, None)


def test_allocator_settings_are_made_once_and_say_whether_they_took():
    assert tune_allocator() is tune_allocator()
    assert isinstance(tune_allocator(), bool)
