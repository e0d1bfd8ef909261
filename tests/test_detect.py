"""Which modules are MLP blocks: by what their forward does."""

from __future__ import annotations

import types

import pytest
import torch
from mlp_models import (
    GATED,
    M64,
    MEMBERS,
    PREFIX,
    BlockSetup,
    Gated,
    OneBlock,
    Packed,
    Plain,
    assert_near,
    block_reference,
    block_step,
    make_linear,
    mlp_of,
    one_block,
    taken_as_block,
)
from models import adapted, gradients, random_cotangent, random_input, randomize_adapters, tokens
from oracle import assert_equal, error
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import relu

from peft_fastlora import FastLoraConfig, fusion_report
from peft_fastlora.activations import GELU, RELU, SIGMOID, SILU, TANH
from peft_fastlora.detect import Block, block_of
from peft_fastlora.gated_mlp import FastLoraGatedMLP

FACTOR = 1.0
IDENTITY = nn.Identity()


class Children(Gated):
    """All children that the forwards below call, and more state than a block may read."""

    def __init__(self, linear=None, setup=M64) -> None:
        super().__init__(linear or make_linear(setup), setup)
        d, f = setup.features
        self.w1, self.w2, self.w3 = nn.Linear(d, f), nn.Linear(f, d), nn.Linear(d, f)
        self.gate_up_proj = nn.Linear(d, 2 * f)
        self.norm = nn.LayerNorm(f)
        self.dropout = nn.Dropout(0.1)
        self.scale = 2.0
        self.steps = 0


def block_with(forward) -> Block | str:
    return block_of(type("Block", (Children,), {"forward": forward})())


# -- structures -------------------------------------------------------------------------------------------------------


def up_first(self, x):
    return self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x)))


def called_up_first(self, x):
    up = self.up_proj(x)
    return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


def renamed(self, x):
    return self.w2(self.act_fn(self.w1(x)) * self.w3(x))


def in_steps(self, x):
    gate = self.gate_proj(x)
    gate = self.act_fn(gate)
    gate *= self.up_proj(x)
    return self.down_proj(gate)


def functional_silu(self, x):
    return self.w2(F.silu(self.w1(x)) * self.w3(x))


def functional_gelu(self, x):
    return self.w2(nn.functional.gelu(self.w1(x)) * self.w3(x))


def functional_sigmoid(self, x):
    return self.w2(torch.sigmoid(self.w1(x)) * self.w3(x))


def functional_tanh(self, x):
    return self.w2(torch.tanh(self.w1(x)) * self.w3(x))


def imported_relu(self, x):
    return self.w2(relu(self.w1(x)))


def packed(self, x):
    gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
    return self.down_proj(self.act_fn(gate) * up)


def packed_gate_second(self, x):
    up, gate = self.gate_up_proj(x).chunk(2, -1)
    return self.down_proj(up * self.act_fn(gate))


def packed_by_torch(self, x):
    halves = self.gate_up_proj(x).chunk(2, dim=-1)
    return self.down_proj(F.silu(halves[0]) * halves[1])


def plain(self, x):
    return self.down_proj(self.act_fn(self.up_proj(x)))


STRUCTURES = {
    Gated.forward: Block("gated", ("gate_proj", "up_proj"), 0, "act_fn", "down_proj"),
    up_first: Block("gated", ("up_proj", "gate_proj"), 1, "act_fn", "down_proj"),
    called_up_first: Block("gated", ("up_proj", "gate_proj"), 1, "act_fn", "down_proj"),
    renamed: Block("gated", ("w1", "w3"), 0, "act_fn", "w2"),
    in_steps: Block("gated", ("gate_proj", "up_proj"), 0, "act_fn", "down_proj"),
    functional_silu: Block("gated", ("w1", "w3"), 0, SILU, "w2"),
    functional_gelu: Block("gated", ("w1", "w3"), 0, GELU, "w2"),
    functional_sigmoid: Block("gated", ("w1", "w3"), 0, SIGMOID, "w2"),
    functional_tanh: Block("gated", ("w1", "w3"), 0, TANH, "w2"),
    imported_relu: Block("plain", ("w1",), 0, RELU, "w2"),
    packed: Block("packed", ("gate_up_proj",), 0, "act_fn", "down_proj"),
    packed_gate_second: Block("packed", ("gate_up_proj",), 1, "act_fn", "down_proj"),
    packed_by_torch: Block("packed", ("gate_up_proj",), 0, SILU, "down_proj"),
    plain: Block("plain", ("up_proj",), 0, "act_fn", "down_proj"),
}


@pytest.mark.parametrize("forward", STRUCTURES, ids=lambda forward: forward.__name__)
def test_structure_is_recognised(forward):
    assert block_with(forward) == STRUCTURES[forward]


@pytest.mark.parametrize("forward", [f for f in STRUCTURES if f is not imported_relu], ids=lambda f: f.__name__)
def test_recognised_structure_runs_as_one_node_and_equals_stock(forward):
    """Which factor is the gate, and which half, matters for the result: silu(gate) * up is not silu(up) * gate."""
    block = STRUCTURES[forward]
    kind = type("Block", (Children,), {"forward": forward})
    results = []
    for config_class in (LoraConfig, FastLoraConfig):
        torch.manual_seed(0)
        base = OneBlock(kind().double())
        model = adapted(base, config_class, M64, list(block.projections), seed=0)
        x = random_input(M64)
        y = model(x)
        y.backward(random_cotangent(y))
        results.append({"y": y.detach(), "dX": x.grad} | gradients(model))
    assert taken_as_block(y)
    assert len(results[0]) == 2 + 2 * len(block.projections)
    assert_near(results[1], results[0])


def test_renamed_children_are_matched_by_role():
    """w1, w3, w2 of Llama's own code; the names of the usual children mean nothing."""

    def swapped(self, x):
        return self.gate_proj(self.act_fn(self.down_proj(x)) * self.up_proj(x))

    assert block_with(swapped) == Block("gated", ("down_proj", "up_proj"), 0, "act_fn", "gate_proj")


@pytest.mark.parametrize("training", [True, False])
def test_structure_is_the_same_in_training_and_evaluation(training):
    assert block_of(Children().train(training)) == STRUCTURES[Gated.forward]


# -- refusals (19) ----------------------------------------------------------------------------------------------------


def gelu_with_arguments(self, x):
    return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


def multiplied(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 0.5)


def multiplied_before(self, x):
    return self.down_proj(self.act_fn(0.5 * self.gate_proj(x)) * self.up_proj(x))


def multiplied_by_attribute(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x) * self.scale) * self.up_proj(x))


def multiplied_after(self, x):
    return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def clamped(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=10)) * self.up_proj(x))


def clamped_by_torch(self, x):
    return self.down_proj(self.act_fn(torch.clamp(self.gate_proj(x), max=10)) * self.up_proj(x))


def norm_before_down(self, x):
    return self.down_proj(self.norm(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


def dropout_after(self, x):
    return self.dropout(self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


def functional_dropout(self, x):
    return self.down_proj(F.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


def residual(self, x):
    return x + self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def missing_activation(self, x):
    return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def no_activation(self, x):
    return self.down_proj(self.gate_proj(x) * self.up_proj(x))


def two_activations(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.act_fn(self.up_proj(x)))


def activation_of_the_product(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x) * self.up_proj(x)))


def gate_squared(self, x):
    gate = self.gate_proj(x)
    return self.down_proj(self.act_fn(gate) * gate)


def up_of_gate(self, x):
    gate = self.gate_proj(x)
    return self.down_proj(self.act_fn(gate) * self.w2(gate))


def called_twice(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.gate_proj(x))


def called_for_nothing(self, x):
    self.w3(x)
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def sets_attribute(self, x):
    self.steps = x
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def sets_child(self, x):
    self.w3 = x
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def reads_training(self, x):
    if self.training:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return self.down_proj(self.act_fn(self.gate_proj(x)))


def reads_global(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * FACTOR)


def calls_global(self, x):
    return self.down_proj(IDENTITY(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


def reads_weight(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * F.linear(x, self.up_proj.weight))


def reads_values(self, x):
    up = self.up_proj(x)
    return self.down_proj(self.act_fn(self.gate_proj(x)) * up) if up else up


def many_tensors(self, *x):
    return self.down_proj(self.act_fn(self.gate_proj(x[0])) * self.up_proj(x[0]))


def keywords(self, x, **options):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def keyword_only(self, x, *, factor=1):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def second_argument(self, x, residual=None):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def child_with_arguments(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x, 1)) * self.up_proj(x))


def generator(self, x):
    yield self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def inner_function(self, x):
    return self.down_proj((lambda t: t)(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


def split_along_rows(self, x):
    gate, up = self.gate_up_proj(x).chunk(2)
    return self.down_proj(self.act_fn(gate) * up)


def split_in_three(self, x):
    gate, up, _ = self.gate_up_proj(x).chunk(3, dim=-1)
    return self.down_proj(self.act_fn(gate) * up)


def one_half_twice(self, x):
    gate, _ = self.gate_up_proj(x).chunk(2, dim=-1)
    return self.down_proj(self.act_fn(gate) * gate)


def half_of_another(self, x):
    gate, _ = self.gate_up_proj(x).chunk(2, dim=-1)
    _, up = self.w1(x).chunk(2, dim=-1)
    return self.down_proj(self.act_fn(gate) * up)


def returns_a_tuple(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)), x


OTHER = "its forward is not down(act(gate(x)) * up(x))"
REFUSED = {
    gelu_with_arguments: "its forward calls gelu",
    multiplied: "its forward multiplies by 0.5",
    multiplied_before: "its forward multiplies by 0.5",
    multiplied_by_attribute: "its forward uses scale",
    multiplied_after: "its forward multiplies by 2",
    clamped: "its forward uses clamp",
    clamped_by_torch: "its forward uses clamp",
    norm_before_down: OTHER,
    dropout_after: OTHER,
    functional_dropout: "its forward calls dropout",
    residual: "its forward does something else than calling children and multiplying (unsupported operand",
    missing_activation: "its forward uses activation",
    no_activation: OTHER,
    two_activations: "its forward calls a child twice",
    activation_of_the_product: OTHER,
    up_of_gate: OTHER,
    called_twice: "its forward calls a child twice",
    called_for_nothing: "its forward also calls w3",
    sets_attribute: "its forward uses steps",
    sets_child: "its forward sets self.w3",
    reads_training: "its forward uses training",
    reads_global: "its forward uses FACTOR",
    calls_global: "its forward uses IDENTITY",  # which may be another module, or hold another function, tomorrow
    reads_weight: "its forward uses linear, weight",
    reads_values: "its forward depends on the values of a tensor",
    many_tensors: "its forward is not a simple function of one tensor",
    keywords: "its forward is not a simple function of one tensor",
    keyword_only: "its forward is not a simple function of one tensor",
    second_argument: "its forward is not a simple function of one tensor",
    child_with_arguments: "its forward calls gate_proj with more than one tensor",
    generator: "its forward is not a simple function of one tensor",
    inner_function: "its forward is not a simple function of one tensor",
    split_along_rows: "its forward splits a tensor into 2 parts along dimension 0",
    split_in_three: "its forward splits a tensor into 3 parts along dimension -1",
    one_half_twice: OTHER,
    half_of_another: OTHER,
    returns_a_tuple: OTHER,
}


@pytest.mark.parametrize("forward", REFUSED, ids=lambda forward: forward.__name__)
def test_other_formula_is_refused_with_its_reason(forward):
    """Behaviour 19: the children have the usual names, the forward does something else."""
    reason = block_with(forward)
    assert isinstance(reason, str)
    assert reason.startswith(REFUSED[forward])


def test_closure_is_refused():
    """What it closes over may change between calls."""
    factor = nn.Identity()

    def forward(self, x):
        return self.down_proj(factor(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))

    assert block_with(forward) == "its forward is not a plain function"


def test_forward_that_calls_super_is_refused():
    class Child(Children):
        def forward(self, x):
            return super().forward(x)

    assert block_of(Child()) == "its forward is not a plain function"


def test_callable_object_as_forward_is_refused():
    class Callable:
        def __call__(self, x):
            return x

    assert block_with(Callable()) == "its forward is not a plain function"


def test_forward_replaced_on_the_instance_decides():
    """The effective forward: whatever the class says, the instance runs its own."""
    module = Children()
    assert block_of(module) == STRUCTURES[Gated.forward]
    module.forward = types.MethodType(renamed, module)
    assert block_of(module) == STRUCTURES[renamed]
    module.forward = types.MethodType(clamped, module)
    assert block_of(module) == REFUSED[clamped]
    module.forward = lambda x: x
    assert block_of(module) == "its forward was replaced on the instance"
    module.forward = types.MethodType(Gated.forward, Children())
    assert block_of(module) == "its forward was replaced on the instance"


def test_child_that_is_not_there_is_refused():
    module = Children()
    del module.act_fn
    assert block_of(module) == "its forward uses act_fn"
    module.act_fn = F.silu  # an attribute, but no child: it may be anything at the next call
    assert block_of(module) == "its forward uses act_fn"


def test_detection_runs_nothing_and_changes_nothing():
    module = Children()
    before = {name: id(value) for name, value in vars(module).items()}
    calls = []
    for child in module.children():
        child.register_forward_hook(lambda *_: calls.append(1))
    assert isinstance(block_of(module), Block)
    assert calls == []
    assert {name: id(value) for name, value in vars(module).items()} == before


@pytest.mark.parametrize(
    "forward", [multiplied, clamped, norm_before_down, residual, two_activations], ids=lambda f: f.__name__
)
def test_refused_module_trains_to_stock_gradients(forward):
    kind = type("Block", (Children,), {"forward": forward})
    results = []
    for config_class in (LoraConfig, FastLoraConfig):
        torch.manual_seed(0)
        model = adapted(OneBlock(kind().double()), config_class, M64, list(GATED), seed=0)
        x = random_input(M64)
        y = model(x)
        y.backward(random_cotangent(y))
        results.append({"y": y.detach(), "dX": x.grad} | gradients(model))
    assert not isinstance(mlp_of(model), FastLoraGatedMLP)
    assert not taken_as_block(y)
    assert_near(results[1], results[0])


def test_gate_that_is_its_own_factor_runs_stock_with_a_reason():
    """gate * act(gate) has the shape of a block, and one child in two roles."""
    kind = type("Block", (Children,), {"forward": gate_squared})
    results = []
    for config_class in (LoraConfig, FastLoraConfig):
        torch.manual_seed(0)
        model = adapted(OneBlock(kind().double()), config_class, M64, ["gate_proj", "down_proj"], seed=0)
        x = random_input(M64)
        y = model(x)
        y.backward(random_cotangent(y))
        results.append({"y": y.detach(), "dX": x.grad} | gradients(model))
    assert not taken_as_block(y)
    assert not [row for row in fusion_report(model).rows if row.kind == "gated_mlp"]
    assert_near(results[1], results[0])


# -- what the configuration says does not matter (19) -----------------------------------------------------------------


@pytest.mark.parametrize("said, held", [("silu", "gelu"), ("gelu", "silu")])
@pytest.mark.parametrize("form", [Gated, Packed, Plain], ids=lambda form: form.__name__)
def test_the_activation_that_the_module_holds_decides(form, said, held):
    """A configuration may say one thing while the module holds another (Gemma did)."""
    name = form.__name__.lower()
    setup = BlockSetup(base=torch.float64, x=torch.float64, adapter=torch.float64, form=name, activation=held)
    model = one_block(FastLoraConfig, setup)
    mlp = mlp_of(model)
    model.config = mlp.config = types.SimpleNamespace(hidden_act=said, hidden_activation=said)
    x = random_input(setup)
    found = block_step(model, x, setup, fused=True)
    reference = block_reference(model, setup, x, random_cotangent(found["y"]))
    assert len(reference) == 2 + 2 * len(MEMBERS[name])
    assert_near(found, reference)


@pytest.mark.parametrize("said, held", [("silu", "gelu"), ("gelu", "silu")])
def test_gemma_whose_config_and_module_disagree(said, held):
    from transformers import GemmaConfig
    from transformers.activations import ACT2FN
    from transformers.models.gemma.modeling_gemma import GemmaMLP

    results = []
    for config_class in (LoraConfig, FastLoraConfig):
        torch.manual_seed(0)
        mlp = GemmaMLP(GemmaConfig(hidden_size=16, intermediate_size=40, hidden_act=said)).double()
        mlp.act_fn = ACT2FN[held]
        model = adapted(OneBlock(mlp), config_class, M64, list(GATED), seed=0)
        x = random_input(M64)
        y = model(x)
        y.backward(random_cotangent(y))
        results.append({"y": y.detach(), "dX": x.grad} | gradients(model))
    assert taken_as_block(y)
    assert_near(results[1], results[0])


# -- mixtures of experts (20) -----------------------------------------------------------------------------------------

MOE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "use_cache": False,
}
MLA = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def _qwen2_moe():
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**MOE, num_experts=4, shared_expert_intermediate_size=24))


def _mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**MOE, num_local_experts=4))


def _deepseek_v3():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(DeepseekV3Config(**MOE | MLA | {"num_key_value_heads": 4}))


# model -> the blocks that fuse when every Linear outside the experts is adapted
MIXTURES = {
    _qwen2_moe: ["model.layers.0.mlp.shared_expert", "model.layers.1.mlp.shared_expert"],
    _mixtral: [],
    _deepseek_v3: ["model.layers.0.mlp", "model.layers.1.mlp.shared_experts"],
}


class Wrapped(nn.Module):
    """Hides the type of a model: newer PEFT adapts experts instead, where it knows the type."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, labels=ids).loss


def _experts_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Experts, routers, and the modules that hold them."""
    words = ("Experts", "Router", "TopK", "SparseMoe", "MoeBlock", "MoE", "Gate")
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__.endswith(words)]
    return [
        *found,
        *((name, module) for name, module in model.named_modules() if name.endswith((".gate", ".experts"))),
    ]


@pytest.mark.parametrize("make", MIXTURES, ids=lambda make: make.__name__[1:])
def test_experts_and_routers_are_no_blocks_and_shared_experts_are(make):
    """Behaviour 20."""
    torch.manual_seed(0)
    base = make()
    outside = {
        name.rpartition(".")[2]
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear) and ".experts." not in name and not name.endswith("lm_head")
    }
    pattern = r"(?!.*\.experts\.).*\.(" + "|".join(sorted(outside)) + ")"
    results = []
    for config_class in (LoraConfig, FastLoraConfig):
        torch.manual_seed(0)
        model = get_peft_model(Wrapped(make()), config_class(r=4, target_modules=pattern))
        randomize_adapters(model, 0)
        loss = model(tokens())
        loss.backward()
        results.append({"loss": loss.detach()} | gradients(model))
    experts = _experts_of(model)
    assert experts
    assert not [name for name, module in experts if isinstance(module, FastLoraGatedMLP)]
    rows = [row for row in fusion_report(model).rows if row.kind == "gated_mlp"]
    assert [row.name.removeprefix("base_model.model.model.") for row in rows] == MIXTURES[make]
    assert {row.path for row in rows} <= {"fused"}
    stock, ours = results
    assert stock.keys() == ours.keys()
    # float32 (grouped products of experts know no float64) through a whole model; a wrong term is off by 1e-2 and more
    assert max(error(ours[name], stock[name]) for name in stock) < 1e-4


def test_packed_experts_are_refused_with_a_reason():
    """In newer transformers all experts of a layer are two tensors in one module."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    if not hasattr(mixtral, "MixtralExperts"):
        pytest.skip("this transformers keeps each expert in a module of its own")
    experts = next(module for module in _mixtral().modules() if type(module) is mixtral.MixtralExperts)
    assert isinstance(block_of(experts), str)


def test_block_names_come_from_the_module_itself():
    """The instrument: the names in `MEMBERS` are those that detection finds."""
    for form in (Gated, Packed, Plain):
        name = form.__name__.lower()
        model = one_block(FastLoraConfig, BlockSetup(form=name))
        block = mlp_of(model).fast_lora_block
        assert (block.form, block.projections) == (name, MEMBERS[name])
        assert model.get_submodule(PREFIX) is mlp_of(model)
    twin = one_block(LoraConfig)
    assert_equal(dict(one_block(FastLoraConfig).state_dict()), dict(twin.state_dict()))
