"""Depth routing: plain forward passes written here, transformers' own block attention residual, and the contract."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quant_bench import models, registry, runner
from quant_bench.depth import Read, routers_of
from quant_bench.errors import NotApplicable, SpecError
from quant_bench.mechanisms import undecayed
from quant_bench.model import LanguageModel
from quant_bench.packing import Segment, packed_hidden
from quant_bench.quantizer import Calibration
from quant_bench.testing import check_arm, tiny_ids, tiny_model
from quant_bench.testing.tokens import tiny_calibration

OASIS = "attnres_oasis(beta=0.5,coupled=True,depth=softmax1)+softmax1"
ARMS = (
    "attnres(blocks=2,form=block)",
    "attnres(beta=0.5,blocks=3,coupled=True,depth=softmax1,form=block)+softmax1",
    "attnres(depth=sparsemax)+sparsemax",
    "attnres_oasis(depth=clipped)+clipped_softmax",
    OASIS,
    "attnres_oasis(beta=0.5,centred=False,coupled=True,depth=entmax15)+clipped_softmax1",
    "attnres_oasis(beta=0.5,coupled=True,recency=last,train_beta=False)+combo2",
    "attnres(coupled=True)+renorm+sink_logit",
    "attnres+gated",
    "attnres+sink_token",
)


@pytest.mark.parametrize("text", ARMS)
def test_arm_keeps_its_contract(text: str) -> None:
    check_arm(registry.build("arms", text), ("llama", "qwen3"))


def _with(text: str, family: str = "llama", moved: float = 0.3, **overrides: Any) -> LanguageModel:
    """A model in float64 whose arm has left its start."""
    model = models.attach(tiny_model(family, **overrides), text)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.module.named_parameters():
        if ".depth_" in name or ".attention_core." in name:
            parameter.data += moved * torch.randn(parameter.shape, generator=generator)
    model.module.double()
    return model


class Plain:
    """A Llama forward pass with depth routing, as the papers write it: every source stacked, every weight a softmax."""

    def __init__(self, model: LanguageModel, null: bool) -> None:
        self.w = {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
        self.config, self.null = model.config, null
        self.epsilon = model.config.rms_norm_eps
        self.layers = model.config.num_hidden_layers

    def norm(self, x: Tensor, name: str) -> Tensor:
        # transformers normalizes in float32 whatever the model's dtype
        x = x.float()
        return self.w[f"{name}.weight"] * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)).double()

    def attention(self, x: Tensor, layer: str) -> tuple[Tensor, Tensor]:
        """Output, and the null mass as the mean over heads."""
        heads, kv = self.config.num_attention_heads, self.config.num_key_value_heads
        x = self.norm(x, f"{layer}.input_layernorm")
        q, k, v = (functional.linear(x, self.w[f"{layer}.self_attn.{name}_proj.weight"]) for name in "qkv")
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, count, -1) for part, count in ((q, heads), (k, kv), (v, kv)))
        dim = q.shape[-1]
        # the model's own base of rotary frequencies, in float32 as transformers computes them
        half = torch.arange(0, dim, 2).float() / dim
        angles = torch.arange(length).float()[:, None] * (1.0 / 10000.0**half)
        cos, sin = (torch.cat((f(angles), f(angles)), -1)[:, None].double() for f in (torch.cos, torch.sin))
        q, k = (p * cos + torch.cat((-p[..., dim // 2 :], p[..., : dim // 2]), -1) * sin for p in (q, k))
        k, v = (part.repeat_interleave(heads // kv, 2) for part in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(dim)
        raised = scores.exp().tril()
        total = raised.sum(-1, keepdim=True) + (1.0 if self.null else 0.0)
        mixed = torch.einsum("bhqk,bkhd->bqhd", raised / total, v).flatten(2)
        psi = (1.0 / total if self.null else torch.zeros_like(total))[..., 0].mean(1)
        return functional.linear(mixed, self.w[f"{layer}.self_attn.o_proj.weight"]), psi

    def mlp(self, x: Tensor, layer: str) -> Tensor:
        x = self.norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (functional.linear(x, self.w[f"{layer}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return functional.linear(functional.silu(gate) * up, self.w[f"{layer}.mlp.down_proj.weight"])

    def weigh(self, scores: Tensor, psi: Tensor, router: str, null: bool) -> Tensor:
        raw = self.w.get(f"{router}.weigher.raw")
        if raw is not None:
            scores = scores - torch.log1p(raw.exp()) * (psi - psi.mean(0))
        raised = scores.exp()
        return raised / (raised.sum(0) + (1.0 if null else 0.0))

    def kimi(self, ids: Tensor, null: bool, blocks: int | None = None) -> Tensor:
        """Full form, or sublayers summed in blocks, the last of which takes the remainder."""
        outputs = [self.w["model.embed_tokens.weight"][ids]]
        psis = [torch.zeros(ids.shape, dtype=torch.float64)]
        state, psi = outputs[0], psis[0]
        for step in range(2 * self.layers):
            layer, name = f"model.layers.{step // 2}", ("depth_attention", "depth_mlp")[step % 2]
            if step % 2 == 0:
                output, psi = self.attention(state, layer)
            else:
                output = self.mlp(state, layer)
            outputs.append(output)
            psis.append(psi)
            values, nulls = torch.stack(outputs), torch.stack(psis)
            if blocks is not None:
                size = 2 * self.layers // blocks
                owner = torch.tensor([0, *(1 + min(s // size, blocks - 1) for s in range(step + 1))])
                groups = [owner == block for block in range(int(owner.max()) + 1)]
                values = torch.stack([values[group].sum(0) for group in groups])
                nulls = torch.stack([nulls[group].mean(0) for group in groups])
            router = f"{layer}.{name}"
            unit = values / (values.square().mean(-1, keepdim=True) + self.epsilon).sqrt()
            scores = unit * self.w[f"{router}.gain"] @ self.w[f"{router}.query"]
            state = (self.weigh(scores, nulls, router, null)[..., None] * values).sum(0)
        return self.norm(state, "model.norm")

    def oasis(self, ids: Tensor, null: bool, last: bool = False) -> Tensor:
        history = [self.w["model.embed_tokens.weight"][ids]]
        psis = [torch.zeros(ids.shape, dtype=torch.float64)]
        for index in range(self.layers):
            layer = f"model.layers.{index}"
            output, psi = self.attention(history[-1], layer)
            u = history[-1] + output
            x = self.route(f"{layer}.depth_attention", [*history, u], [*psis, psi], null, last)
            v = x + self.mlp(x, layer)
            history.append(self.route(f"{layer}.depth_mlp", [*history, u, v], [*psis, psi, psi], null, last))
            psis.append(psi)
        return self.norm(history[-1], "model.norm")

    def route(self, router: str, states: list[Tensor], psis: list[Tensor], null: bool, last: bool) -> Tensor:
        values, n = torch.stack(states), len(states)
        query, key = (self.w[f"{router}.{name}_projection.weight"] for name in ("query", "key"))
        scores = ((values @ key.T) * (values[-1] @ query.T)).sum(-1) / math.sqrt(query.shape[0])
        ramp = [float(i == n - 1) if last else i / (n - 1) for i in range(n)]
        scores = scores + self.w[f"{router}.rho"] * torch.tensor(ramp, dtype=torch.float64)[:, None, None]
        return (self.weigh(scores, torch.stack(psis), router, null)[..., None] * values).sum(0)


def _hidden(model: LanguageModel, ids: Tensor) -> Tensor:
    body: Any = model.body
    with torch.no_grad():
        hidden: Tensor = body(input_ids=ids, use_cache=False).last_hidden_state
    return hidden


@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize("blocks", [None, 1, 2, 4, 5, 6, 8])
def test_attnres_equals_its_plain_definition(blocks: int | None, null: bool) -> None:
    form = "" if blocks is None else f"blocks={blocks},form=block"
    coupled = "beta=0.5,coupled=True,depth=softmax1" if null else ""
    settings = ",".join(part for part in (coupled, form) if part)
    model = _with(f"attnres({settings})" + ("+softmax1" if null else ""), num_hidden_layers=3)
    wanted = Plain(model, null).kimi(tiny_ids(), null, None if blocks == 8 else blocks)
    assert torch.allclose(_hidden(model, tiny_ids()), wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("recency", ["ramp", "last"])
@pytest.mark.parametrize("null", [False, True])
def test_attnres_oasis_equals_its_plain_definition(recency: str, null: bool) -> None:
    coupled = "beta=0.5,coupled=True,depth=softmax1," if null else ""
    model = _with(f"attnres_oasis({coupled}recency={recency})" + ("+softmax1" if null else ""), num_hidden_layers=3)
    wanted = Plain(model, null).oasis(tiny_ids(), null, recency == "last")
    assert torch.allclose(_hidden(model, tiny_ids()), wanted, atol=1e-12, rtol=0)


def _loss(hidden: Tensor) -> Tensor:
    factor = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5), dtype=hidden.dtype)
    return (hidden * factor).sum()


@pytest.mark.parametrize("form", ["attnres", "attnres_oasis"])
def test_gradients_pass_through_null_mass_and_sums_in_place(form: str) -> None:
    model = _with(f"{form}(beta=2.0,coupled=True,depth=softmax1)+softmax1")
    model.module.requires_grad_(True)
    body: Any = model.body
    named = {name: p for name, p in model.module.named_parameters() if "lm_head" not in name}
    got = torch.autograd.grad(_loss(body(input_ids=tiny_ids(), use_cache=False).last_hidden_state), [*named.values()])
    plain = Plain(model, null=True)
    hidden = plain.kimi(tiny_ids(), null=True) if form == "attnres" else plain.oasis(tiny_ids(), null=True)
    wanted = torch.autograd.grad(_loss(hidden), [*named.values()])
    for name, mine, other in zip(named, got, wanted, strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-5 * float(other.abs().max())), name
        assert bool(mine.any()), f"{name} has no gradient"


@pytest.mark.parametrize("blocks", [2, 3])
def test_weights_and_blocks_are_those_of_transformers_inkling2(blocks: int) -> None:
    from transformers.models.inkling2.configuration_inkling2 import Inkling2TextConfig
    from transformers.models.inkling2.modeling_inkling2 import Inkling2BlockAttentionResidual

    layers, width = 6, 48
    model = _with(f"attnres(form=block,blocks={blocks})", num_hidden_layers=layers, rms_norm_eps=1e-6)
    model.module.float()
    routers = routers_of(model.body)
    generator = torch.Generator().manual_seed(0)
    state, *outputs = torch.randn(1 + 2 * layers, 2, 5, width, generator=generator)
    config = Inkling2TextConfig(hidden_size=width)
    config._attn_implementation = "eager"
    depth = routers[0].begin(routers, state)
    # as its decoder layers keep them: finished blocks, and the running sum
    finished, running = state.new_zeros(2, 5, 0, width), state
    reads: list[Read] = []
    for router, output in zip(routers, outputs, strict=True):
        router.observer = reads.append
        state = depth.read(router, state, output, None)
        layer, of_mlp = divmod(router.place, 2)
        if layer % (layers // blocks) == 0 and not of_mlp:
            finished, running = torch.cat((finished, running[:, :, None]), 2), output
        else:
            running = running + output
        theirs = Inkling2BlockAttentionResidual(config)
        # it has no gain and scales its scores
        theirs.query.data = (router.query * router.gain).data * math.sqrt(width)
        sources = torch.cat((finished, running[:, :, None]), 2)
        # its values are normalized, ours are not
        unit = theirs.norm(sources)
        assert reads[-1].weights.shape[-1] == sources.shape[2]
        wanted = theirs(finished, running)[0]
        assert torch.allclose((reads[-1].weights[..., None] * unit).sum(2), wanted, atol=1e-5)
        assert torch.allclose((reads[-1].weights[..., None] * sources).sum(2), state, atol=1e-5)


def _reads(model: LanguageModel, ids: Tensor) -> list[Read]:
    reads: list[Read] = []
    for router in routers_of(model.body):
        router.observer = reads.append
    _hidden(model, ids)
    return reads


def test_attnres_starts_as_the_average_with_equal_weights_exactly() -> None:
    model = models.attach(tiny_model("llama"), "attnres")
    for count, read in enumerate(_reads(model, tiny_ids()), 2):
        assert read.weights.shape[-1] == count
        assert torch.equal(read.weights, torch.full_like(read.weights, 1 / count))
    names = [f"{layer}.{part}" for layer in range(2) for part in ("attention", "mlp")]
    assert read.names == ("embedding", *names)


def test_depth_null_takes_as_much_as_each_source_at_the_start() -> None:
    model = models.attach(tiny_model("llama"), "attnres(depth=softmax1)")
    for count, read in enumerate(_reads(model, tiny_ids()), 2):
        assert torch.allclose(read.weights, torch.full_like(read.weights, 1 / (count + 1)))


def test_conversion_leaves_a_pretrained_model_as_it_is() -> None:
    ids = tiny_ids()
    plain = _hidden(tiny_model("llama"), ids)
    kept = models.attach(tiny_model("llama"), "attnres_oasis(draw=zero_query,recency=last,rho=12.0)")
    published = models.attach(tiny_model("llama"), "attnres_oasis(draw=normal,rho=8.0)")
    assert float((_hidden(kept, ids) - plain).abs().max()) < 1e-3
    assert float((_hidden(published, ids) - plain).abs().max()) > 1e-2
    body: Any = kept.body
    kept.module.requires_grad_(True)
    _loss(body(input_ids=ids, use_cache=False).last_hidden_state).backward()
    for router in routers_of(body):
        assert bool(router.query_projection.weight.grad.any())
        assert float(router.rho.grad) != 0


@pytest.mark.parametrize(
    "text", [OASIS, "attnres(coupled=True)+clipped_softmax1", "attnres(coupled=True)+renorm+sink_logit"]
)
def test_null_mass_is_the_same_packed_cached_and_rounded(text: str) -> None:
    model = models.attach(tiny_model("llama"), text)
    ids = tiny_ids()
    full = [read.psi for read in _reads(model, ids[:1])]
    reads: list[Read] = []
    for router in routers_of(model.body):
        router.observer = reads.append
    row = ids[0].tolist()
    packed_hidden(model, [Segment(ids[1].tolist()), Segment(row[:9]), Segment(row[9:], 1)])
    for whole, packed in zip(full, reads, strict=True):
        assert whole is not None
        assert packed.psi is not None
        assert torch.allclose(packed.psi[:, ids.shape[1] :], whole, atol=1e-6)
        assert 0.0 < float(whole[..., -1].mean()) < 1.0
        assert not whole[..., 0].any()


def test_null_mass_is_the_one_that_attention_weights_lack() -> None:
    model = models.attach(tiny_model("llama"), "attnres+sink_logit")
    read = _reads(model, tiny_ids())[0]
    plain = _with("attnres+softmax1", moved=0.0)
    with torch.no_grad():
        _, psi = Plain(plain, null=True).attention(plain.body.embed_tokens(tiny_ids()), "model.layers.0")  # type: ignore[operator]
    assert read.psi is not None
    assert torch.allclose(read.psi[..., 1].double(), psi, atol=1e-5)


def test_without_a_null_nothing_is_coupled() -> None:
    model = models.attach(tiny_model("llama"), "attnres")
    assert all(read.psi is None for read in _reads(model, tiny_ids()))


def test_beta_starts_where_it_is_told_and_can_be_frozen() -> None:
    published, half, frozen = (
        routers_of(models.attach(tiny_model("llama"), f"attnres_oasis(coupled=True{more})+softmax1").body)
        for more in ("", ",beta=0.5", ",beta=0.0,train_beta=False")
    )
    assert float(published[0].weigher.raw) == pytest.approx(-5.0, abs=1e-5)
    assert float(half[0].weigher.beta()) == pytest.approx(0.5, abs=1e-6)
    assert float(frozen[0].weigher.beta()) == 0.0
    assert not list(frozen[0].weigher.parameters())


def test_coupling_lowers_sources_whose_attention_went_to_the_null() -> None:
    model = models.attach(tiny_model("llama"), "attnres(beta=10.0,coupled=True,train_beta=False)+softmax1")
    read = _reads(model, tiny_ids())[0]
    assert read.psi is not None
    # the embedding has none and gains what the attention loses
    assert bool((read.weights[..., 1] < 0.5).all())
    assert bool((read.psi[..., 1] > 0).all())


def test_queries_of_depth_do_not_decay_and_projections_do() -> None:
    kimi = undecayed(models.attach(tiny_model("llama"), "attnres").module)
    assert {"model.layers.0.depth_attention.query", "model.layers.1.depth_mlp.gain"} <= kimi
    assert not undecayed(models.attach(tiny_model("llama"), "attnres_oasis").module)


def test_projections_of_routers_are_quantized_and_vectors_accounted_for() -> None:
    quantizer = registry.build("quantizers", "w8a8")
    oasis = quantizer.quantize(models.attach(tiny_model("llama"), "attnres_oasis"), Calibration())
    assert "model.layers.1.depth_mlp.key_projection" in oasis.coverage.quantized
    kimi = quantizer.quantize(models.attach(tiny_model("llama"), "attnres"), Calibration())
    assert "stay in float" in kimi.coverage.skipped["model.layers.0.depth_attention"]


@pytest.mark.parametrize("arm", ["attnres", OASIS])
@pytest.mark.parametrize("recipe", ["gptq", "smoothquant", "awq", "llm_int8", "quarot"])
def test_every_recipe_works_on_routers_and_its_executions_are_equal(arm: str, recipe: str) -> None:
    settings = {"llm_int8": "(threshold=1.0)", "quarot": "(residual=False)"}.get(recipe, "(calibration_batches=1)")
    logits = []
    for execution in ("simulated", "integer"):
        quantizer = registry.build("quantizers", f"{recipe}:w8a8-{execution}{settings}")
        model = models.attach(tiny_model("llama"), arm)
        before = {site.path for site in model.layout.linears}
        model = quantizer.quantize(model, tiny_calibration(quantizer))
        # a recipe may wrap a product, which adds to its path
        assert all(any(found.startswith(path) for found in model.coverage.quantized) for path in before)
        logits.append(model.module(input_ids=tiny_ids()).logits)
    assert torch.equal(*logits)


class _Foreign(Tensor):
    """A weight of another library, whose products are that library's."""

    products = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.products += function is functional.linear and type(args[1]) is cls
        return super().__torch_function__(function, types, args, kwargs or {})


def test_keys_of_a_foreign_weight_are_products_of_its_own() -> None:
    model = models.attach(tiny_model("llama"), "attnres_oasis")
    key: Any = routers_of(model.body)[1].get_submodule("key_projection")
    key.weight = nn.Parameter(key.weight.detach().as_subclass(_Foreign), requires_grad=False)
    model.module(input_ids=tiny_ids())
    assert _Foreign.products == 1


def test_coverage_counts_a_key_for_every_source() -> None:
    model = registry.build("quantizers", "w8a8").quantize(
        models.attach(tiny_model("llama"), "attnres_oasis"), Calibration()
    )
    width, inner = 48, 64
    attention, mlp, head = 2 * width * width + 2 * width * 24, 3 * width * 80, width * 97
    # routers of the two layers have 2, 3, 3 and 4 sources
    layers = 2 * (attention + mlp) + (4 + 2 + 3 + 3 + 4) * width * inner
    assert model.coverage.mac_share == pytest.approx(layers / (layers + head))


def test_a_run_of_the_float_model_reads_sources_where_they_lie() -> None:
    model = runner._ready(models.attach(tiny_model("llama"), "attnres_oasis"))
    plain = models.attach(tiny_model("llama"), "attnres_oasis")
    keys: list[Tensor] = []
    for router in routers_of(model.body):
        key: Any = router.get_submodule("key_projection")
        key.forward = lambda x, key=key: keys.append(x) or type(key).forward(key, x)
    got = model.module(input_ids=tiny_ids()).logits
    assert not keys
    assert torch.allclose(got, plain.module(input_ids=tiny_ids()).logits, atol=1e-4)


def test_history_keeps_what_scope_full_rounds() -> None:
    quantizer = registry.build("quantizers", "w4a4-static(calibration_batches=1)")
    model = models.attach(tiny_model("llama"), "attnres_oasis")
    model = quantizer.quantize(model, tiny_calibration(quantizer))
    sources: list[Any] = []
    seen: list[Tensor] = []
    router: Any = routers_of(model.body)[2]
    original = router.combine

    def combine(scores: Tensor, given: Any, *rest: Any) -> Tensor:
        sources.extend(given)
        return original(scores, given, *rest)

    router.combine = combine
    layer: Any = model.module.get_submodule("model.layers.1")
    layer.register_forward_pre_hook(lambda m, arguments: seen.append(arguments[0]))
    _hidden(model, tiny_ids())
    levels = [len(part.unique()) for part in (sources[1], seen[0])]
    assert levels[0] > 100, "the router's output in the history is rounded"
    assert levels[1] <= 16, "what the next layer reads is not rounded"


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox", "gemma3"])
@pytest.mark.parametrize("text", ["attnres", "attnres_oasis"])
def test_other_layouts_are_refused(text: str, family: str) -> None:
    with pytest.raises(NotApplicable, match="depth routing"):
        models.attach(tiny_model(family), text)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("attnres(coupled=True)", "needs a null"),
        ("attnres_oasis(coupled=True)+sparsemax", "needs a null"),
        ("attnres+attnres_oasis", "routers already"),
        ("attnres(coupled=True)+sink_logit+sink_token", "sink token"),
    ],
)
def test_what_does_not_compose_is_refused(text: str, match: str) -> None:
    with pytest.raises(NotApplicable, match=match):
        models.attach(tiny_model("llama"), text)


@pytest.mark.parametrize(
    "text",
    [
        "attnres(blocks=0)",
        "attnres(coupled=True,beta=-1.0)",
        "attnres(coupled=True,beta=0.0)",
        "attnres(gamma=0.1)",
        # what would change nothing
        "attnres_oasis(beta=0.5)",
        "attnres_oasis(beta_rate=100.0)",
    ],
)
def test_settings_out_of_range_are_usage_errors(text: str) -> None:
    with pytest.raises(SpecError):
        registry.build("arms", text)


def test_narrow_training_steps_are_finite() -> None:
    model = models.attach(tiny_model("llama"), OASIS)
    model.module.requires_grad_(True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.module(input_ids=tiny_ids(), labels=tiny_ids(), use_cache=False).loss
    loss.backward()
    gradients: list[nn.Parameter] = list(model.module.parameters())
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in gradients)
