"""Arms: the contract for each, and truths from elsewhere: gpt-oss, torch's own attention, entmax, algebra."""

import math
from typing import Any

import entmax
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quant_bench import models, registry
from quant_bench.arm import Attended
from quant_bench.attention import causal_mask, core_of, sdpa
from quant_bench.errors import ModelError, NotApplicable, SpecError
from quant_bench.mechanisms import undecayed
from quant_bench.mechanisms.fused import _phantom_key, null_attention, with_key_bias
from quant_bench.mechanisms.gates import HeadGate, NormGate, ProjectionGate
from quant_bench.mechanisms.normalizers import entmax15, safe_softmax, softpick, sparsemax, stretched
from quant_bench.mechanisms.tiles import tiled_attention
from quant_bench.model import LanguageModel
from quant_bench.scoring import final_hidden
from quant_bench.testing import check_arm, tiny_ids, tiny_model
from quant_bench.tiny import CONFIGS

ARMS = (
    *registry.names("arms"),
    *("clipped_softmax(alpha=12)", "gated(kind=mlp)", "gated(fine_tuning=True,kind=all_features)"),
    *("output_gate(kind=headwise)", "renorm(gate=projection)", "projection_gate+sink_logit", "norm_aware+norm_gate"),
)
# each arm on every layout takes a minute; one layout of separate and one of fused projections are always checked
QUICK = ("llama", "gpt2")


@pytest.mark.parametrize("text", ARMS)
def test_arm_keeps_its_contract(text: str) -> None:
    check_arm(registry.build("arms", text), QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("text", ARMS)
def test_arm_keeps_its_contract_on_every_layout(text: str) -> None:
    check_arm(registry.build("arms", text), tuple(family for family in CONFIGS if family not in QUICK))


def _operands(heads: int = 4, kv_heads: int = 2, queries: int = 9, dim: int = 8, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, queries), (kv_heads, queries), (kv_heads, queries))
    return tuple(torch.randn(2, h, n, dim, generator=generator, dtype=dtype) for h, n in shapes)


def _logits(model: LanguageModel, ids: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model.module(input_ids=tiny_ids() if ids is None else ids, use_cache=False).logits


def _with(text: str, family: str = "llama") -> LanguageModel:
    return models.attach(tiny_model(family), text)


def test_null_attention_equals_the_sinks_of_gpt_oss() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    query, key, value = _operands()
    null = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)
    module = nn.Module()
    module.sinks, module.num_key_value_groups, module.training = null, 2, False
    causal = causal_mask(9, 9, None, torch.device("cpu"))
    mask = torch.zeros(9, 9, dtype=torch.float64).masked_fill(~causal, -torch.inf)[None, None]
    expected = eager_attention_forward(module, query, key, value, mask, scaling=0.4)[0].transpose(1, 2)
    got = null_attention(query, key, value, null, mask=None, scaling=0.4)
    assert torch.allclose(got, expected, atol=1e-12)


def test_softmax1_equals_torchs_zero_attention() -> None:
    # add_zero_attn appends a key and a value of zeros
    torch.manual_seed(0)
    reference = nn.MultiheadAttention(16, 2, bias=False, add_zero_attn=True, batch_first=True, dtype=torch.float64)
    reference.out_proj.weight.data.copy_(torch.eye(16))
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    future = ~causal_mask(7, 7, None, torch.device("cpu"))
    expected = reference(x, x, x, attn_mask=future, need_weights=False)[0]
    query, key, value = (
        part.view(3, 7, 2, 8).transpose(1, 2) for part in (x @ reference.in_proj_weight.T).chunk(3, dim=-1)
    )
    got = null_attention(query, key, value, torch.zeros(2, dtype=torch.float64), mask=None, scaling=8**-0.5)
    assert torch.allclose(got.transpose(1, 2).flatten(2), expected, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_null_attention_are_exact(kv_heads: int, masked: bool) -> None:
    leaves = [part.requires_grad_(True) for part in _operands(kv_heads=kv_heads, queries=5)]
    null = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    mask = None
    if masked:
        mask = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(1)) < 0.6
        mask[1, 0, 2] = False

    def core(query: Tensor, key: Tensor, value: Tensor, null: Tensor) -> Tensor:
        return null_attention(query, key, value, null, mask=mask, scaling=0.5)

    assert torch.autograd.gradcheck(core, (*leaves, null))


def test_null_attention_is_one_whatever_the_device_does() -> None:
    # what runs on accelerators, against the kernel's rescale on the CPU
    query, key, value = _operands()
    null = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)
    some = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(1)) < 0.6
    some[0, 0, 3] = False
    for mask in (None, some):
        for count in (9, 4, 1):
            part = None if mask is None else mask[:, :, -count:]
            got = _phantom_key(query[:, :, -count:], key, value, null, part, 0.4)
            wanted = null_attention(query[:, :, -count:], key, value, null, mask=part, scaling=0.4)
            assert torch.allclose(got, wanted, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_sparse_normalizers_equal_the_entmax_package(scale: float) -> None:
    scores = torch.randn(6, 33, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale
    scores[2, 5:] = -torch.inf
    scores[3] = 0.25
    for ours, theirs in ((sparsemax, entmax.sparsemax), (entmax15, entmax.entmax15)):
        assert torch.allclose(ours(scores), theirs(scores.nan_to_num(neginf=-1e6), dim=-1), atol=1e-9)


@pytest.mark.parametrize("normalize", [sparsemax, entmax15, softpick, safe_softmax])
def test_gradients_of_normalizers_are_exact(normalize: Any) -> None:
    scores = torch.randn(4, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_(True)
    assert torch.autograd.gradcheck(normalize, (scores,))


@pytest.mark.parametrize("normalize", [sparsemax, entmax15, softpick, safe_softmax])
def test_normalizers_survive_empty_rows_and_large_scores(normalize: Any) -> None:
    scores = torch.tensor([[-torch.inf] * 4, [100.0, 99.0, -torch.inf, -100.0], [-100.0] * 4, [1e4, -1e4, 0.0, 1.0]])
    scores.requires_grad_(True)
    weights = normalize(scores)
    assert bool(weights.isfinite().all())
    assert not weights[0].any()
    weights.square().sum().backward()
    assert bool(scores.grad.isfinite().all())


def test_clipped_softmax_reaches_exact_zeros_and_ones() -> None:
    weights = stretched(torch.tensor([0.02, 0.08, 0.9]), -0.03, 1.2)
    assert weights.tolist() == pytest.approx([0.0, 1.23 * 0.08 - 0.03, 1.0], abs=1e-6)
    assert float(weights[0]) == 0.0
    assert float(weights[2]) == 1.0


# ---- identities of arXiv 2609.22005 and 2606.22325


@pytest.mark.parametrize("phantom", [False, True])
def test_value_gating_is_routing_times_a_scalar_of_the_query(phantom: bool) -> None:
    # lemma 3.1: sum alpha g v = Z sum alpha~ v, with Z = (1 - p) sum alpha_real g
    query, key, value = _operands(kv_heads=4)
    gate = torch.rand(2, 4, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores = (query @ key.transpose(-1, -2)).masked_fill(~causal_mask(9, 9, None, torch.device("cpu")), -torch.inf)
    null = torch.full((2, 4, 9, 1), 0.7, dtype=torch.float64) if phantom else None
    weights = safe_softmax(scores, null)
    left = (weights * gate[:, :, None]) @ value
    routed = torch.softmax(scores + gate.log()[:, :, None], -1)
    real = torch.softmax(scores, -1)
    mass = 1 - weights.sum(-1)
    scalar = (1 - mass) * (real * gate[:, :, None]).sum(-1)
    assert torch.allclose(left, scalar[..., None] * (routed @ value), atol=1e-12)
    assert torch.allclose(scalar, (weights * gate[:, :, None]).sum(-1), atol=1e-12)


def test_phantom_mass_and_real_mass_are_one() -> None:
    scores = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    null = torch.tensor([[0.4]], dtype=torch.float64).expand(3, 1)
    phantom = (null - torch.logaddexp(torch.logsumexp(scores, -1, keepdim=True), null)).exp()
    assert torch.allclose(safe_softmax(scores, null).sum(-1, keepdim=True) + phantom, torch.ones(3, 1).double())


def test_off_by_one_is_a_sink_logit_at_its_start() -> None:
    assert torch.equal(_logits(_with("softmax1")), _logits(_with("sink_logit")))


def test_a_sink_logit_far_down_and_open_gates_are_the_baseline() -> None:
    baseline = _logits(tiny_model("llama"))
    sink, norm, projection = (_with(text) for text in ("sink_logit", "norm_gate", "projection_gate"))
    for name, parameter in sink.module.named_parameters():
        if name.endswith("null.logit"):
            parameter.data.fill_(-1e4)
    for name, parameter in norm.module.named_parameters():
        if name.endswith("gate.threshold"):
            parameter.data.fill_(-1e3)
    for name, parameter in projection.module.named_parameters():
        if name.endswith("gate.bias"):
            parameter.data.fill_(1e3)
    for model in (sink, norm, projection):
        assert torch.allclose(_logits(model), baseline, atol=1e-5)


def test_routing_by_a_constant_gate_is_the_baseline() -> None:
    # at its start the projection gate is the same for every read
    assert torch.allclose(_logits(_with("renorm(gate=projection)")), _logits(tiny_model("llama")), atol=1e-4)


def test_norm_aware_attention_is_softmax_over_distances() -> None:
    query, key, value = _operands(kv_heads=4)
    causal = causal_mask(9, 9, None, torch.device("cpu"))
    arm = registry.build("arms", "norm_aware")
    a = Attended(query, key, value, torch.zeros(2, 9, 32).double(), causal, 0.5, 64, {})
    distance = torch.cdist(query, key).square() * -0.25
    expected = torch.softmax(distance.masked_fill(~causal, -torch.inf), -1) @ value
    assert torch.allclose(arm.reference(a), expected, atol=1e-12)


def test_norm_aware_attention_is_softmax_over_distances_where_a_model_scales_its_queries_itself() -> None:
    model = _with("norm_aware", "opt")
    layer: Any = model.module.model.decoder.layers[0].self_attn
    seen: dict[str, Tensor] = {}
    undo = [layer.out_proj.register_forward_pre_hook(lambda m, inputs: seen.update(mixed=inputs[0]))]
    for name in ("q_proj", "k_proj", "v_proj"):
        part = layer.get_submodule(name)
        undo.append(part.register_forward_hook(lambda m, i, out, name=name: seen.update({name: out})))
    _logits(model)
    for hook in undo:
        hook.remove()
    query, key, value = (
        seen[name].unflatten(-1, (layer.num_heads, -1)).transpose(1, 2).double()
        for name in ("q_proj", "k_proj", "v_proj")
    )
    distance = torch.cdist(query, key).square() / (-2 * math.sqrt(query.shape[-1]))
    causal = causal_mask(query.shape[2], query.shape[2], None, query.device)
    expected = torch.softmax(distance.masked_fill(~causal, -torch.inf), -1) @ value
    assert torch.allclose(seen["mixed"].double(), expected.transpose(1, 2).flatten(2), atol=1e-6)


def test_a_bias_beyond_float16_hides_its_key_and_is_a_number() -> None:
    query, key, _ = _operands(kv_heads=4, dtype=torch.float16)
    bias = torch.zeros(2, 4, 9)
    bias[:, :, 0] = -1e6
    wide_query, wide_key = with_key_bias(query, key, bias, 0.25)
    scores = (wide_query.double() @ wide_key.double().transpose(-1, -2)) * 0.25
    assert bool(scores.isfinite().all())
    assert float(scores[..., 0].max()) < -1e4
    assert torch.allclose(scores[..., 1:], (query.double() @ key.double().transpose(-1, -2))[..., 1:] * 0.25)


def test_gates_start_almost_open() -> None:
    read = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
    norm, projection = NormGate(2, 8, read), ProjectionGate(2, 8, read)
    assert bool((torch.sigmoid(norm.argument(read)) >= 0.982).all())
    assert torch.allclose(projection(read), read * torch.sigmoid(torch.tensor(4.0)))
    size = read.square().mean(-1).sqrt()
    assert torch.allclose(norm.argument(read), 4 + 8 * size, atol=1e-5)


def test_rotating_reads_leaves_gates_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    read = torch.randn(5, 2, 8, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(2, 8, 8, generator=generator, dtype=torch.float64)).Q
    turned = torch.einsum("hij,bhj->bhi", rotation, read)
    norm, projection = NormGate(2, 8, read), ProjectionGate(2, 8, read)
    projection.weight.data.normal_(generator=generator)
    assert torch.allclose(norm.argument(turned), norm.argument(read), atol=1e-12)
    before = projection.argument(read)
    assert not torch.allclose(projection.argument(turned), before, atol=1e-3)
    projection.rotate_(rotation)
    assert torch.allclose(projection.argument(turned), before, atol=1e-12)


def test_a_gated_head_starts_near_its_probability_and_fine_tuning_near_the_identity() -> None:
    baseline = _logits(tiny_model("llama"))
    for kind in ("linear", "mlp", "all_features"):
        model = _with(f"gated(fine_tuning=True,kind={kind})")
        assert float((_logits(model) - baseline).norm() / baseline.norm()) < 0.01


def test_a_gate_starts_as_its_published_code_draws_it() -> None:
    def bias(kind: str, probability: float) -> Tensor:
        core: Any = _with(f"gated(kind={kind},probability={probability})").module
        return core.model.layers[0].self_attn.output_gate.biases[-1].detach()

    assert torch.allclose(bias("linear", 0.2), torch.full_like(bias("linear", 0.2), math.log(0.2 / 0.8)))
    # a product of all features, and an MLP, keep what nn.Linear draws, whatever the probability is
    for kind in ("all_features", "mlp"):
        assert torch.equal(bias(kind, 0.2), bias(kind, 0.9))
        assert len(bias(kind, 0.2).unique()) > 1


def test_a_head_without_a_slice_of_its_own_has_no_gate_on_it() -> None:
    like = torch.zeros(1)
    assert HeadGate(3, 20, like, "all_features", 0.25, False)(torch.zeros(1, 2, 20)).shape == (1, 3, 2, 1)
    with pytest.raises(NotApplicable, match="no equal slices"):
        HeadGate(3, 20, like, "linear", 0.25, False)


def test_an_arm_that_another_attention_passes_by_gives_no_score() -> None:
    model = _with("sink_logit")
    assert final_hidden(model, tiny_ids()).shape[:2] == tiny_ids().shape
    module: Any = model.module
    module.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match="attn_implementation='sdpa'"):
        final_hidden(model, tiny_ids())


def test_combos_equal_what_they_are_made_of() -> None:
    for combo, parts in (("combo", "sink_logit+norm_gate"), ("combo2", "sink_logit+projection_gate")):
        assert torch.equal(_logits(_with(combo)), _logits(_with(parts)))
        assert undecayed(_with(combo).module) == undecayed(_with(parts).module)


@pytest.mark.parametrize("text", ["softmax1+sink_logit", "renorm+norm_aware", "gated+output_gate", "combo+norm_gate"])
def test_arms_that_change_the_same_part_are_not_composed(text: str) -> None:
    with pytest.raises(SpecError, match="cannot be composed"):
        registry.build("arms", text)


@pytest.mark.parametrize("text", ["norm_gate+renorm(gate=projection)", "renorm+projection_gate", "combo+renorm"])
def test_a_routing_gate_does_not_look_at_gated_reads(text: str) -> None:
    with pytest.raises(NotApplicable, match="reads that are not gated"):
        _with(text)


@pytest.mark.parametrize("text", ["softmax+softmax", "sink_logit+softmax", "sink_token+sink_token"])
def test_a_mechanism_has_one_name(text: str) -> None:
    with pytest.raises(SpecError, match=r"leave it out|more than once"):
        registry.build("arms", text)


# ---- the sink token, against a sequence that really starts with it


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "opt", "qwen3"])
def test_a_sink_token_is_one_more_token_before_the_text(family: str) -> None:
    model, plain = _with("sink_token", family), tiny_model(family)
    ids = tiny_ids()
    vector: Any = dict(model.module.named_parameters())[f"{model.layout.body}.sink_token.vector"]
    embeds = plain.module.get_input_embeddings()(ids)
    table: Any = getattr(plain.body, "wpe", None) or getattr(plain.body, "embed_positions", None)
    positions = torch.arange(ids.shape[1] + 1)[None]
    if table is not None:
        # it has no position of its own, and the text keeps its positions
        first = table.weight[getattr(table, "offset", 0)]
        vector = vector - first
        positions = (positions - 1).clamp_min(0)
    embeds = torch.cat((vector.expand(len(ids), 1, -1), embeds), 1)
    mask = torch.ones(embeds.shape[:2], dtype=torch.long)
    with torch.no_grad():
        options = {"inputs_embeds": embeds, "position_ids": positions, "attention_mask": mask, "use_cache": False}
        expected = plain.module(**options).logits[:, 1:]
    assert torch.allclose(_logits(model), expected, atol=1e-5)


def test_a_sink_token_refuses_several_sequences_in_one_row() -> None:
    # transformers would keep them apart by their positions, which the token's mask says nothing of
    model, positions = _with("sink_token"), torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    with pytest.raises(NotApplicable, match="one sequence"):
        model.module(input_ids=tiny_ids()[:1, :7], position_ids=positions, use_cache=False)


def test_a_sink_token_needs_the_whole_context() -> None:
    with pytest.raises(NotApplicable, match="sliding window"):
        _with("sink_token", "gemma3")


# ---- attaching


def test_parameters_of_arms_are_few_and_undecayed() -> None:
    for text, count in (("sink_logit", 4), ("norm_gate", 2), ("projection_gate", 2 * 13), ("combo2", 4 + 2 * 13)):
        model, plain = _with(text), tiny_model("llama")
        added = sum(p.numel() for p in model.module.parameters()) - sum(p.numel() for p in plain.module.parameters())
        # two layers, four query heads, two key/value heads of 12
        assert added == 2 * count
        left_alone = undecayed(model.module)
        assert sum(p.numel() for name, p in model.module.named_parameters() if name in left_alone) == added


@pytest.mark.parametrize("kind", ["linear", "mlp", "all_features"])
def test_biases_of_gated_heads_do_not_decay_though_they_are_stored_as_matrices(kind: str) -> None:
    model = _with(f"gated(kind={kind})")
    gates = [name for name, _ in model.module.named_parameters() if ".output_gate." in name]
    assert undecayed(model.module) == {name for name in gates if ".biases." in name}
    assert len(gates) == (8 if kind == "mlp" else 4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("text", registry.names("arms"))
def test_arms_train_under_autocast(text: str, family: str) -> None:
    # rotary embeddings leave queries and keys in float32 there, beside values in bfloat16
    try:
        model, ids = _with(text, family), tiny_ids()
    except NotApplicable as refusal:
        pytest.skip(str(refusal))
    model.module.requires_grad_(True)
    exact = float(model.module(input_ids=ids, labels=ids, use_cache=False).loss.detach())
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.module(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    assert abs(float(loss.detach()) - exact) < 0.05
    assert all(bool(p.grad.isfinite().all()) for p in model.module.parameters() if p.grad is not None)


@pytest.mark.parametrize("normalize", [sparsemax, entmax15, softpick])
def test_tiles_stay_in_float32_under_autocast(normalize: Any) -> None:
    def attended() -> Tensor:
        return tiled_attention(
            _operands(dtype=torch.float32),
            None,
            0.4,
            at_scores=lambda scores: scores,
            mechanism=lambda scores, heads: normalize(scores),
            at_probabilities=lambda weights: weights,
        )

    with torch.autocast("cpu", torch.bfloat16):
        found = attended()
    assert torch.equal(found, attended())


def test_shared_parameters_keep_their_values() -> None:
    plain = dict(tiny_model("llama").module.named_parameters())
    for text in registry.names("arms"):
        own = {name.replace(".projection.", "."): p for name, p in _with(text).module.named_parameters()}
        assert all(torch.equal(own[name], parameter) for name, parameter in plain.items()), text


def test_drawn_initial_values_follow_the_seed() -> None:
    first, again, other = (models.attach(tiny_model("llama"), "output_gate", seed) for seed in (1, 1, 2))
    assert torch.equal(_logits(first), _logits(again))
    assert not torch.equal(_logits(first), _logits(other))


def test_a_model_has_one_arm() -> None:
    model = _with("sink_logit")
    assert models.attach(model, "sink_logit") is model
    with pytest.raises(ModelError, match="sink_logit"):
        models.attach(model, "softmax")


def test_weights_that_lack_the_arm_are_refused(tmp_path: Any) -> None:
    model = tiny_model("llama")
    model.config.quant_bench_arm = "projection_gate"
    models.save(model, tmp_path)
    with pytest.raises(ModelError, match="missing"):
        models.load_model(str(tmp_path))


def test_the_core_without_arm_is_torchs_attention() -> None:
    query, key, value = _operands()
    module = tiny_model("llama").module.get_submodule("model.layers.0.self_attn")
    got = core_of(module)(module, query, key, value, mask=None, scaling=0.4)
    expected = functional.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), is_causal=True, scale=0.4
    )
    assert core_of(module) is sdpa
    assert torch.allclose(got, expected)
    assert math.isfinite(float(got.sum()))


def test_a_mask_that_does_more_than_hide_keys_is_refused() -> None:
    ids = tiny_ids()
    causal = causal_mask(ids.shape[1], ids.shape[1], None, ids.device).expand(len(ids), 1, -1, -1).clone()
    causal[1, :, 5:, :3] = False
    hidden = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)

    def logits(mask: Tensor) -> Tensor:
        module: Any = _with("sink_logit").module
        with torch.no_grad():
            return module(input_ids=ids, attention_mask=mask, use_cache=False).logits

    wanted = logits(causal)
    assert not torch.allclose(wanted, _logits(_with("sink_logit")), atol=1e-4)
    assert torch.equal(logits(hidden), wanted)
    for wrong in (causal.long(), hidden + 0.5, torch.where(causal, -1.0, hidden)):
        with pytest.raises(NotApplicable, match="which keys a query may see"):
            logits(wrong)


def test_how_far_an_arm_moves_trained_weights_is_noted() -> None:
    before = tiny_model("llama")
    model = models.attach_to_trained(tiny_model("llama"), "sink_logit")
    ids = torch.randint(97, (1, 64), generator=torch.Generator().manual_seed(0))
    old, new = (_logits(m, ids).double().log_softmax(-1) for m in (before, model))
    divergence = float((old.exp() * (old - new)).sum(-1).mean())
    assert model.identity.note is not None
    assert f"mean KL divergence is {divergence:.3g} nats" in model.identity.note
    assert divergence > 0.01
    assert models.attach_to_trained(tiny_model("llama"), "softmax").identity.note == before.identity.note


@pytest.mark.parametrize("text", ["sink_logit", "norm_gate", "projection_gate", "renorm", "combo", "combo2"])
def test_the_papers_arms_add_less_than_a_ten_thousandth(text: str) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    # the shape of tier 124m; on the meta device nothing is stored
    config = LlamaConfig(
        vocab_size=50257, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12
    )
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    before = sum(parameter.numel() for parameter in module.parameters())
    model = LanguageModel(module, None, tiny_model("llama").identity, models.layout_of(module))
    model = registry.build("arms", text).attach(model)
    after = sum(parameter.numel() for parameter in model.module.parameters())
    assert 0 < after - before < 1e-4 * before
