"""Projections that read one tensor run as one node once their owner was observed (q/k/v and their like)."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch
from counting import Operators, SavedTensors
from models import (
    NF4,
    P64,
    P,
    Setup,
    adapted,
    autocast,
    cast_adapters,
    gradients,
    layer_of,
    llama,
    quantized,
    random_cotangent,
    randomize_adapters,
    tokens,
)
from oracle import NEAR_EXACT, assert_equal, assert_near_exact, error, reference_step
from owners import (
    ALONE,
    MEMBERS,
    TOGETHER,
    announced,
    assert_agree,
    backward,
    cross,
    learn,
    make_owner,
    owner_input,
    owner_of,
    owner_step,
    owner_twins,
    reasons,
    set_script,
    shared,
    together,
)
from peft import LoraConfig
from poison import cloned_saves, originals, poisoned
from torch import nn

from peft_fastlora import FastLoraConfig, fusion_report

BF16 = Setup(base=torch.bfloat16, x=torch.bfloat16, adapter=torch.bfloat16)
BF16_FP32 = Setup(base=torch.bfloat16, x=torch.bfloat16)  # float32 adapters
AUTOCAST = Setup(autocast=True)
NF4_BF16 = Setup(quant="nf4-double", base=torch.bfloat16, x=torch.bfloat16, compute=torch.bfloat16)
EXACT_SETUPS = [P, P64, Setup(bias=False), Setup(quant="nf4"), NF4, Setup(lora_bias=True)]
SETUPS = [*EXACT_SETUPS, BF16, BF16_FP32, AUTOCAST, NF4_BF16]
UNEQUAL = {"rank_pattern": {"k_proj": 2, "v_proj": 7}, "alpha_pattern": {"q_proj": 3, "k_proj": 16}}
SUBSETS = [subset for size in (1, 2, 3) for subset in itertools.combinations(MEMBERS, size)]


def _ids(names):
    return "+".join(name[0] for name in names)


# -- did it run (1, 3)? -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: f"{s}{'-lorabias' if s.lora_bias else ''}")
def test_first_forward_is_observed_and_later_ones_are_one_node(setup):
    model = make_owner(FastLoraConfig, setup)
    for _ in range(4):
        owner_step(model, owner_input(setup), autocast_on=setup.autocast)
    assert owner_of(model).log == [ALONE, TOGETHER, TOGETHER, TOGETHER]


def test_outputs_of_a_group_have_the_same_grad_fn():
    model = make_owner(FastLoraConfig)
    learn(model, owner_input())
    q, k, v = model(owner_input()).values()
    assert type(q.grad_fn).__name__ == "LoraGroupFunctionBackward"
    assert q.grad_fn is k.grad_fn is v.grad_fn


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 5), (1,), (1, 1), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("setup", EXACT_SETUPS, ids=lambda s: f"{s}{'-lorabias' if s.lora_bias else ''}")
def test_group_equals_stock(setup, shape):
    stock, ours = owner_twins(setup)
    x = owner_input(setup, shape)
    assert_agree(stock, ours, x, nodes=ALONE)
    found = assert_agree(stock, ours, x, nodes=TOGETHER)
    assert len(found) == 3 + 1 + (9 if setup.lora_bias else 6)


def test_adapters_of_the_fixture_are_not_zero():
    """Behaviour 2: at B = 0 most of these tests would be vacuous."""
    model = make_owner(FastLoraConfig)
    assert all(layer_of(model, name).lora_B.default.weight.abs().max() > 0.1 for name in MEMBERS)


def test_report_says_not_yet_observed_and_later_lists_the_members():
    model = make_owner(FastLoraConfig)
    assert announced(model) == dict.fromkeys(MEMBERS, "linear/fused")
    assert all(reason.startswith("not yet observed") for reason in reasons(model).values())
    model(owner_input())
    (row,) = fusion_report(model).rows
    assert (row.kind, row.path, row.reason) == ("shared_input", "fused", None)
    assert row.members == tuple(f"base_model.model.{name}" for name in MEMBERS)


def _llama_nodes(model):
    """By layer: the node that made its output, for all layers outside MLP blocks."""
    nodes = {}
    handles = [
        module.register_forward_hook(lambda m, a, y, name=name: nodes.__setitem__(name, y.grad_fn))
        for name, module in model.named_modules()
        if name.endswith(("q_proj", "k_proj", "v_proj", "o_proj"))
    ]
    loss = model(tokens(), labels=tokens()).loss
    for handle in handles:
        handle.remove()
    loss.backward()
    return nodes


def _announced_equals_taken(model, nodes):
    for row in fusion_report(model).rows:
        if row.kind == "gated_mlp":
            continue
        assert len({nodes[name] for name in row.members}) == 1, row
        assert all(nodes[name].name() == "LoraGroupFunctionBackward" for name in row.members), row
    assert len(set(nodes.values())) == sum(row.kind != "gated_mlp" for row in fusion_report(model).rows)


def test_llama_is_as_announced_before_and_after_training():
    """Behaviour 3: 2 MLP blocks, 2 q/k/v groups, 2 output projections."""
    model = llama(FastLoraConfig)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    counts = {("shared_input", "fused"): 2, ("linear", "fused"): 2, ("gated_mlp", "fused"): 2}
    before = fusion_report(model)
    assert before.counts == {("linear", "fused"): 8, ("gated_mlp", "fused"): 2}
    nodes = _llama_nodes(model)
    assert len(set(nodes.values())) == 8
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad()
        report = fusion_report(model)
        assert report.counts == counts
        _announced_equals_taken(model, _llama_nodes(model))
        assert fusion_report(model) == report


def test_llama_with_q_and_v_only_fuses_the_two():
    model = llama(FastLoraConfig, target_modules=["q_proj", "v_proj"])
    model(tokens())
    report = fusion_report(model)
    assert report.counts == {("shared_input", "fused"): 2}
    assert [[name.rpartition(".")[2] for name in row.members] for row in report.rows] == [["q_proj", "v_proj"]] * 2
    loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    stock = llama(LoraConfig, target_modules=["q_proj", "v_proj"])
    stock(tokens(), labels=tokens()).loss.backward()
    found, expected = gradients(model), gradients(stock)
    assert len(found) == 8
    # 256 roundings: what two layers of softmax and norms make of the different order of additions (measured: 22)
    assert max(error(found[name], expected[name]) for name in expected) < 256 * 2**-24


# -- each member for itself (6, 8) ------------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", [P, P64, NF4], ids=str)
def test_unequal_ranks_and_scalings_equal_stock(setup):
    stock, ours = owner_twins(setup, **UNEQUAL)
    assert [layer_of(ours, name).r["default"] for name in MEMBERS] == [4, 2, 7]
    assert len({layer_of(ours, name).scaling["default"] for name in MEMBERS}) == 3
    learn(ours, owner_input(setup))
    assert_agree(stock, ours, owner_input(setup), nodes=TOGETHER)


@pytest.mark.parametrize("changed", MEMBERS)
def test_zeroing_one_lora_B_changes_one_output(changed):
    model = make_owner(FastLoraConfig, **UNEQUAL)
    x = owner_input()
    learn(model, x)
    before = model(x)
    layer_of(model, changed).lora_B.default.weight.data.zero_()
    after = model(x)
    assert shared(after) == TOGETHER
    assert {name for name in MEMBERS if not torch.equal(before[name], after[name])} == {changed}
    base = layer_of(model, changed).base_layer(x)
    assert error(after[changed], base) <= NEAR_EXACT[torch.float32]


@pytest.mark.parametrize("changed", MEMBERS)
def test_gradients_of_a_member_depend_on_its_own_output_alone(changed):
    model = make_owner(FastLoraConfig, **UNEQUAL)
    learn(model, owner_input())
    found = []
    for scale in (1.0, -3.0):
        outputs = model(owner_input())
        grads = [
            random_cotangent(y, i) * (scale if name == changed else 1) for i, (name, y) in enumerate(outputs.items())
        ]
        torch.autograd.backward(list(outputs.values()), grads)
        found.append(gradients(model))
    different = {name for name in found[0] if not torch.equal(found[0][name], found[1][name])}
    assert different == {f"base_model.model.{changed}.lora_{part}.default.weight" for part in "AB"}


@pytest.mark.parametrize("used", SUBSETS[:-1], ids=_ids)
def test_outputs_that_nobody_used_give_no_gradient(used):
    stock, ours = owner_twins()
    learn(ours, owner_input())
    found = []
    for model in (stock, ours):
        x = owner_input()
        outputs = model(x)
        backward({name: outputs[name] for name in used})
        found.append({"dX": x.grad} | gradients(model))
    assert shared(outputs) == TOGETHER
    assert len(found[1]) == 1 + 2 * len(used)
    assert_near_exact(found[1], found[0])


def test_scaling_is_read_at_each_call():
    stock, ours = owner_twins()
    learn(ours, owner_input())
    for model in (stock, ours):
        layer_of(model, "k_proj").set_scale("default", 3)
        layer_of(model, "v_proj").scale_layer(0.5)
    assert_agree(stock, ours, owner_input(), nodes=TOGETHER)


# -- which members (5, 21, 22, 24) ------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", SUBSETS, ids=_ids)
def test_every_subset_of_adapted_projections(targets):
    """Behaviour 24. A projection without adapter is the plain `nn.Linear` that it was."""
    stock, ours = owner_twins(target_modules=list(targets))
    for _ in range(3):
        assert_agree(
            stock, ours, owner_input(), nodes=(owner_of(ours).log and {targets}) or {(name,) for name in targets}
        )
    assert announced(ours) == dict.fromkeys(targets, "shared_input/fused" if len(targets) > 1 else "linear/fused")


@pytest.mark.parametrize("biased", [(), *SUBSETS[:-1]], ids=lambda names: _ids(names) or "none")
def test_base_bias_on_any_subset(biased):
    """Behaviour 22."""

    def bases():
        return [nn.Linear(24, out, bias=name in biased) for name, out in zip(MEMBERS, (16, 8, 8), strict=True)]

    stock, ours = owner_twins(bases=bases)
    learn(ours, owner_input())
    assert_agree(stock, ours, owner_input(), nodes=TOGETHER)


@pytest.mark.parametrize("packed", SUBSETS[:-1], ids=_ids)
def test_nf4_mixed_with_dense(packed):
    def bases():
        made = [(name, nn.Linear(64, out)) for name, out in zip(MEMBERS, (128, 64, 64), strict=True)]
        return [quantized(dense, "nf4-double", torch.float32) if name in packed else dense for name, dense in made]

    stock, ours = owner_twins(NF4, bases=bases)
    assert [owner_of(ours).get_submodule(name).fast_lora_4bit for name in MEMBERS] == [n in packed for n in MEMBERS]
    learn(ours, owner_input(NF4))
    assert_agree(stock, ours, owner_input(NF4), nodes=TOGETHER)


@pytest.mark.parametrize("outs", [(64, 8, 8), (8, 8, 64), (1, 2, 3), (16, 16, 16)], ids=str)
def test_widths(outs):
    """Grouped-query attention has narrow k and v."""
    stock, ours = owner_twins(bases=lambda: [nn.Linear(24, out) for out in outs])
    learn(ours, owner_input())
    assert_agree(stock, ours, owner_input(), nodes=TOGETHER)


def _with_adapters(config_class, script=together):
    """`a` of rank 4 on all three, `b` of rank 3 on all three, `c` of rank 2 that misses k."""
    model = make_owner(config_class, P64, script)
    for name, rank, targets in (("b", 3, MEMBERS), ("c", 2, ("q_proj", "v_proj"))):
        model.add_adapter(name, config_class(r=rank, lora_alpha=5 * rank, target_modules=list(targets)))
    cast_adapters(model, torch.float64)
    randomize_adapters(model, 0)
    return model


@pytest.mark.parametrize(
    "active, nodes",
    [
        (["default"], TOGETHER),
        (["b"], TOGETHER),
        (["default", "b"], TOGETHER),
        (["b", "default"], TOGETHER),
        (["c"], {("q_proj", "v_proj")}),
        (["default", "c"], TOGETHER),
        (["c", "b", "default"], TOGETHER),
        ([], set()),
    ],
    ids=lambda value: "+".join(value) or "none" if isinstance(value, list) else "",
)
def test_active_adapters(active, nodes):
    """Behaviour 5: never truncated to the first; one that misses k leaves k stock."""
    stock, ours = _with_adapters(LoraConfig), _with_adapters(FastLoraConfig)
    learn(ours, owner_input(P64))
    for model in (stock, ours):
        model.base_model.set_adapter(active)
    found = assert_agree(stock, ours, owner_input(P64), nodes=nodes)
    assert len(found) == 4 + sum(2 * (2 if name == "c" else 3) for name in active)
    assert_agree(stock, ours, owner_input(P64), nodes=nodes)
    for model in (stock, ours):
        model.base_model.set_adapter(["default"])
    assert_agree(stock, ours, owner_input(P64), nodes=TOGETHER)


def test_pattern_is_learned_with_an_adapter_that_misses_a_member():
    """What is observed is who reads which tensor, not who has an adapter."""
    stock, ours = _with_adapters(LoraConfig), _with_adapters(FastLoraConfig)
    for model in (stock, ours):
        model.base_model.set_adapter(["c"])
    assert_agree(stock, ours, owner_input(P64), nodes={("q_proj",), ("v_proj",)})
    assert_agree(stock, ours, owner_input(P64), nodes={("q_proj", "v_proj")})
    for model in (stock, ours):
        model.base_model.set_adapter(["default"])
    assert_agree(stock, ours, owner_input(P64), nodes=TOGETHER)


def test_disabled_and_merged_adapters_run_stock_and_are_grouped_again_afterwards():
    stock, ours = owner_twins(P64)
    x = owner_input(P64)
    learn(ours, x)
    with stock.disable_adapter(), ours.disable_adapter():
        assert all(torch.equal(ours(x)[name], stock(x)[name]) for name in MEMBERS)
        assert owner_of(ours).log[-1] == set()
    assert_agree(stock, ours, x, nodes=TOGETHER)
    for model in (stock, ours):
        model.merge_adapter()
    with torch.no_grad():
        assert all(torch.equal(ours(x)[name], stock(x)[name]) for name in MEMBERS)
    for model in (stock, ours):
        model.unmerge_adapter()
    assert_agree(stock, ours, x, nodes=TOGETHER)


def test_one_merged_member_leaves_the_others_together():
    stock, ours = owner_twins(P64)
    learn(ours, owner_input(P64))
    for model in (stock, ours):
        layer_of(model, "k_proj").merge()
    assert_agree(stock, ours, owner_input(P64), nodes={("q_proj", "v_proj")})
    assert announced(ours) == {
        "q_proj": "shared_input/fused",
        "k_proj": "linear/stock",
        "v_proj": "shared_input/fused",
    }
    assert reasons(ours)["k_proj"] == "an adapter is merged into the base weight"


def test_cross_attention_groups_k_and_v():
    """Behaviour 21."""
    stock, ours = owner_twins(script=cross)
    x, context = owner_input(seed=1), owner_input(shape=(2, 7), seed=2)
    assert_agree(stock, ours, x, context, nodes=ALONE)
    found = assert_agree(stock, ours, x, context, nodes={("q_proj",), ("k_proj", "v_proj")})
    assert {"dX0", "dX1"} <= found.keys()
    assert announced(ours) == {
        "q_proj": "linear/fused",
        "k_proj": "shared_input/fused",
        "v_proj": "shared_input/fused",
    }


def test_one_module_for_self_attention_and_cross_attention():
    """A context that is x itself: a group of three; where it is not, q alone. Right both times."""
    stock, ours = owner_twins(script=cross)
    x, context = owner_input(seed=1), owner_input(seed=2)
    set_script(lambda owner, x: cross(owner, x, x), stock, ours)
    learn(ours, x)
    assert_agree(stock, ours, x, nodes=TOGETHER)
    set_script(cross, stock, ours)
    for _ in range(3):
        expected, found = owner_step(stock, x, context), owner_step(ours, x, context)
        assert_near_exact(found, expected)
    assert owner_of(ours).log[-1] == {("q_proj",), ("k_proj", "v_proj")}


def test_v_is_absent():
    """Some attention takes k for v."""

    def script(owner, x):
        return {"q_proj": owner.q_proj(x), "k_proj": owner.k_proj(x)}

    stock, ours = owner_twins(script=script)
    assert_agree(stock, ours, owner_input(), nodes={("q_proj",), ("k_proj",)})
    assert_agree(stock, ours, owner_input(), nodes={("q_proj", "k_proj")})
    assert announced(ours)["v_proj"] == "linear/fused"


def test_k_is_taken_from_another_layer():
    """Gemma 3n and others read k of an earlier layer; here even the projection itself is the other layer's."""
    stock, ours = owner_twins()
    donors = owner_twins(P, lora_alpha=7)

    def script(owner, x):
        donor = owner_of(donors[owner is owner_of(ours)])
        return {"q_proj": owner.q_proj(x), "k_proj": donor.k_proj(x), "v_proj": owner.v_proj(x)}

    set_script(script, stock, ours)
    assert_agree(stock, ours, owner_input(), nodes=ALONE)
    assert_agree(stock, ours, owner_input(), nodes={("q_proj", "v_proj"), ("k_proj",)})


@pytest.mark.parametrize("order", list(itertools.permutations(MEMBERS)), ids=_ids)
def test_order_of_calls(order):
    stock, ours = owner_twins(script=lambda owner, x: {name: owner.get_submodule(name)(x) for name in order})
    assert_agree(stock, ours, owner_input(), nodes={(name,) for name in order})
    assert_agree(stock, ours, owner_input(), nodes={order})


def test_modules_to_save_on_a_member():
    """Behaviour 22: the trained copy is used and gets its gradient; the others are one node."""
    lora = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["k_proj"]}
    stock, ours = owner_twins(**lora)
    for model in (stock, ours):
        owner_of(model).k_proj.modules_to_save.default.weight.data.mul_(2)
    assert_agree(stock, ours, owner_input(), nodes={("q_proj",), ("v_proj",)})
    found = assert_agree(stock, ours, owner_input(), nodes={("q_proj", "v_proj")})
    assert "base_model.model.k_proj.modules_to_save.default.weight" in found
    assert all(".original_module." not in name for name in found)


def test_two_groups_of_one_owner():
    """Linear attention and the like: several tensors, several readers each."""

    class Five(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d, self.e = (nn.Linear(24, out) for out in (16, 8, 8, 12, 4))

        def forward(self, x, z):
            return {"a": self.a(x), "d": self.d(z), "b": self.b(x), "e": self.e(z), "c": self.c(x.tanh())}

    found = []
    for config_class in (LoraConfig, FastLoraConfig):
        torch.manual_seed(0)
        model = adapted(Five(), config_class, P, list("abcde"), 0)
        for _ in range(2):
            values = owner_step(model, owner_input(seed=1), owner_input(seed=2))
        outputs = model(owner_input(seed=1), owner_input(seed=2))
        found.append(values)
    assert shared(outputs) == {("a", "b"), ("d", "e"), ("c",)}
    assert_near_exact(found[1], found[0])
    rows = [(row.name.rpartition(".")[2], row.kind) for row in fusion_report(model).rows]
    assert rows == [("model[a, b]", "shared_input"), ("c", "linear"), ("model[d, e]", "shared_input")]


# -- hooks (25) -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["k_proj", "k_proj.base_layer", "k_proj.lora_A.default", "k_proj.lora_B.default"])
@pytest.mark.parametrize("when", ["before learning", "after learning"])
def test_forward_hooks_fire_as_in_stock(where, when):
    """On a part of a member, the member steps aside; on the member itself, it stays in the group."""
    stock, ours = owner_twins(P64)
    x = owner_input(P64)
    if when == "after learning":
        learn(ours, x)
    seen = {}
    for model in (stock, ours):
        calls = seen.setdefault(model, [])
        model.get_submodule(f"base_model.model.{where}").register_forward_hook(
            lambda module, args, y, calls=calls: calls.append((args[0].detach(), y.detach()))
        )
    if when == "before learning":
        owner_step(ours, x)
        seen[ours].clear()
    stepping_aside = where != "k_proj"
    nodes = {("q_proj", "v_proj")} if stepping_aside else TOGETHER
    for _ in range(3):
        assert_agree(stock, ours, x, nodes=nodes)
    assert len(seen[ours]) == len(seen[stock]) == 3
    for (x_ours, y_ours), (x_stock, y_stock) in zip(seen[ours], seen[stock], strict=True):
        assert_near_exact({"x": x_ours, "y": y_ours}, {"x": x_stock, "y": y_stock})
    if stepping_aside:
        assert "hooks" in reasons(ours)["k_proj"]


@pytest.mark.parametrize("kind", ["forward pre", "full backward"])
def test_hooks_of_a_member_that_give_it_another_tensor(kind):
    """The member is called with a tensor of its own then, and computes alone."""
    stock, ours = owner_twins(P64)
    x = owner_input(P64)
    learn(ours, x)
    fired = {stock: 0, ours: 0}
    for model in (stock, ours):
        layer = layer_of(model, "k_proj")

        def count(*_, model=model):
            fired[model] += 1

        if kind == "forward pre":
            layer.register_forward_pre_hook(lambda module, args, count=count: (count(), (args[0] * 2,))[1])
        else:
            layer.register_full_backward_hook(count)
    for _ in range(3):
        expected, found = owner_step(stock, x), owner_step(ours, x)
        assert ("q_proj", "v_proj") in owner_of(ours).log[-1]
        assert_near_exact(found, expected)
    assert fired[ours] == fired[stock] == 3


def test_a_hook_that_changes_an_output():
    stock, ours = owner_twins(P64)
    learn(ours, owner_input(P64))
    for model in (stock, ours):
        layer_of(model, "q_proj").register_forward_hook(lambda module, args, y: y.mul_(2))
    for _ in range(2):
        assert_near_exact(owner_step(ours, owner_input(P64)), owner_step(stock, owner_input(P64)))
    assert ("k_proj", "v_proj") in owner_of(ours).log[-1]


# -- work (29, 16) ----------------------------------------------------------------------------------------------------


def _count(model, setup, requires_grad=True):
    x = owner_input(setup).detach().requires_grad_(requires_grad)
    with Operators() as forward:
        outputs = model(x)
    with Operators() as backward_operators:
        backward(outputs)
    return forward, backward_operators


@pytest.mark.parametrize("setup", [P, P64, BF16, NF4, Setup(lora_bias=True)], ids=str)
@pytest.mark.parametrize("lora", [{}, UNEQUAL], ids=["equal", "unequal"])
def test_7_and_11_products(setup, lora):
    """Behaviour 29."""
    model = make_owner(FastLoraConfig, setup, **lora)
    learn(model, owner_input(setup))
    forward, backward_operators = _count(model, setup)
    assert owner_of(model).log[-1] == TOGETHER
    assert (len(forward.products), len(backward_operators.products)) == (7, 11)
    sizes = [(layer_of(model, name).out_features, layer_of(model, name).in_features) for name in MEMBERS]
    for operators in (forward, backward_operators):
        assert sum(len(operators.with_weight(*size)) for size in set(sizes)) == 3


def test_stock_takes_9_and_15_products():
    forward, backward_operators = _count(make_owner(LoraConfig), P)
    assert (len(forward.products), len(backward_operators.products)) == (9, 15)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad], ids=["no_grad", "grad"])
def test_observing_costs_no_product(mode):
    """The first forward computes each member alone, later ones together; nothing is computed for nothing."""
    model = make_owner(FastLoraConfig)
    counts = []
    for _ in range(3):
        with mode(), Operators() as operators:
            model(owner_input())
        counts.append(len(operators.products))
    assert counts == [9, 7, 7]


def test_cross_attention_products():
    model = make_owner(FastLoraConfig, script=cross)
    inputs = owner_input(seed=1), owner_input(seed=2)
    learn(model, *inputs, nodes={("q_proj",), ("k_proj", "v_proj")})
    with Operators() as forward:
        outputs = model(*inputs)
    with Operators() as backward_operators:
        backward(outputs)
    assert len(forward.products) == 3 + 5
    assert len(backward_operators.products) == 5 + 8


def test_input_without_grad_costs_no_product_with_a_base_weight():
    """Behaviour 16."""
    stock, ours = owner_twins()
    x = owner_input().detach()
    learn(ours, x)
    assert_agree(stock, ours, x, nodes=TOGETHER)
    _, backward_operators = _count(ours, P, requires_grad=False)
    assert len(backward_operators.products) == 7  # u of three, one for all dA, dB of three
    assert not any(p.reads(layer_of(ours, n).out_features, 24) for n in MEMBERS for p in backward_operators.products)


@pytest.mark.parametrize("part, products", [("lora_A", 11), ("lora_B", 10)])
def test_gradients_of_frozen_parameters_are_not_computed(part, products):
    """Behaviour 16. All dA are one product, which the others need; a dB is a product of its own."""
    stock, ours = owner_twins()
    for model in (stock, ours):
        getattr(layer_of(model, "k_proj"), part).requires_grad_(False)
    learn(ours, owner_input())
    found = assert_agree(stock, ours, owner_input(), nodes=TOGETHER)
    assert f"base_model.model.k_proj.{part}.default.weight" not in found
    _, backward_operators = _count(ours, P)
    assert len(backward_operators.products) == products


# -- bytes ------------------------------------------------------------------------------------------------------------

WIDTH, ROWS = 256, 72  # the rank-space tensors, 3 * 4 * 4 bytes a row at most, are 0.09 of x
BYTE_LAYOUTS = {"bf16": BF16, "bf16 with fp32 adapters": BF16_FP32, "autocast": AUTOCAST}
STOCK_UNITS = {"bf16": 1.05, "bf16 with fp32 adapters": 6.09, "autocast": 3.05}


def _saved_units(config_class, setup):
    """What forward keeps of tensors with a row for each token, in units of x in bfloat16; and which node made what."""
    widths = (WIDTH, WIDTH // 4, WIDTH // 4)
    model = make_owner(config_class, setup, bases=lambda: [nn.Linear(WIDTH, out).to(setup.base) for out in widths])
    x = torch.randn(1, ROWS, WIDTH).to(setup.x).requires_grad_() * 1  # no leaf: autocast keeps casts of leaves
    with autocast(setup.autocast):
        model(x)
        with SavedTensors() as saved:
            outputs = model(x)
    saved.tensors = [t for t in saved.tensors if ROWS in t.shape]
    return saved.bytes / (ROWS * WIDTH * 2), shared(outputs)


@pytest.mark.parametrize("layout", BYTE_LAYOUTS)
def test_saved_bytes(layout):
    """q, k and v keep x once, in the narrower of its dtype and the adapters', and their rank-space tensors."""
    units, nodes = _saved_units(FastLoraConfig, BYTE_LAYOUTS[layout])
    assert nodes == TOGETHER
    assert 1 < units <= 1.15


@pytest.mark.parametrize("layout", BYTE_LAYOUTS)
def test_saved_bytes_of_stock(layout):
    """The instrument, and what there is to gain."""
    units, _ = _saved_units(LoraConfig, BYTE_LAYOUTS[layout])
    assert units == pytest.approx(STOCK_UNITS[layout], abs=0.01)


# -- accuracy in half precision (9) -----------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", [BF16, BF16_FP32, Setup(base=torch.bfloat16, autocast=True), NF4_BF16], ids=str)
def test_error_is_at_most_twice_stocks(setup):
    """Against the formula in float64, by the norm of all elements, for each of 12 seeds; see test_two_x_rule."""
    stock, ours = owner_twins(setup)
    learn_input = owner_input(setup)
    with autocast(setup.autocast):
        learn(ours, learn_input)
    errors = defaultdict(list)
    for seed in range(12):
        found = []
        for model in (stock, ours):
            randomize_adapters(model, seed)
            x = owner_input(setup, (2, 8), seed)
            found.append(owner_step(model, x, autocast_on=setup.autocast, seed=seed))
        assert owner_of(ours).log[-1] == TOGETHER
        assert found[0].keys() == found[1].keys()
        exact = {"dX0": 0}
        for i, name in enumerate(MEMBERS):
            cotangent = random_cotangent(found[0][name], seed + i)
            reference = reference_step(stock, x, cotangent, f"base_model.model.{name}")
            exact[name] = reference.pop("y")
            exact["dX0"] = exact["dX0"] + reference.pop("dX")
            exact |= reference
        for name, reference in exact.items():
            if not name.endswith("base_layer.bias"):
                errors[name].append((error(found[0][name], reference), error(found[1][name], reference)))
    assert len(errors) == 10
    ratios = {name: max(our / max(stock, 4 * 2**-24) for stock, our in pairs) for name, pairs in errors.items()}
    assert max(ratios.values()) <= 2, ratios


# -- autograd (13 to 15, 18) ------------------------------------------------------------------------------------------


def _learned(setup=P64, **lora):
    model = make_owner(FastLoraConfig, setup, **lora)
    learn(model, owner_input(setup))
    return model


@pytest.mark.parametrize("setup", [P64, NF4], ids=str)
def test_second_backward_equals_the_first_and_nothing_is_written_to(setup):
    """Behaviour 13."""
    model = _learned(setup)
    x = owner_input(setup)
    with SavedTensors() as saved:
        outputs = model(x)
    assert shared(outputs) == TOGETHER
    grads = [random_cotangent(y, i) for i, y in enumerate(outputs.values())]
    watched = [x, *grads, *saved.tensors]
    before = [t.detach().clone() for t in watched]
    found = []
    for _ in range(2):
        torch.autograd.backward(list(outputs.values()), grads, retain_graph=True)
        found.append({"dX": x.grad} | gradients(model))
        x.grad = None
    assert len(found[0]) == 7
    assert_equal(found[1], found[0])
    assert all(torch.equal(a, b) for a, b in zip(before, watched, strict=True))


def test_a_branch_that_also_uses_x_is_unharmed():
    found = []
    for model in owner_twins(P64):
        for _ in range(2):
            leaf = owner_input(P64)
            x = leaf * 1
            branch = x.sin()
            outputs = model(x)
            torch.autograd.backward([branch.sum(), *(y.sum() for y in outputs.values()), (x**2).sum()])
            values = {"dX": leaf.grad} | gradients(model)
        found.append(values)
    assert shared(outputs) == TOGETHER
    assert_near_exact(found[1], found[0])


def test_double_backward_is_a_clear_error():
    """Behaviour 14."""
    model = _learned()
    x = owner_input(P64)
    loss = sum((y**2).sum() for y in model(x).values())
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


LAYOUTS_OF_X = {
    "transposed": lambda x: x.transpose(0, 1),
    "sliced": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(3, -1, -1),
    "permuted features": lambda x: x.flip(-1),
    "not contiguous": lambda x: torch.cat([x, x], -1)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS_OF_X)
def test_strides_of_the_input(layout):
    """Behaviour 15."""
    stock, ours = owner_twins(P64, script=lambda owner, x: together(owner, LAYOUTS_OF_X[layout](x)))
    learn(ours, owner_input(P64))
    assert_agree(stock, ours, owner_input(P64), nodes=TOGETHER)


@pytest.mark.parametrize("layout", ["sum", "transposed", "sliced"])
def test_strides_of_the_cotangents(layout):
    stock, ours = owner_twins(P64)
    learn(ours, owner_input(P64))
    weight = torch.randn(5, 2, 16, dtype=torch.float64)
    found = []
    for model in (stock, ours):
        x = owner_input(P64)
        q, k, v = model(x).values()
        if layout == "sum":  # expanded gradients
            loss = q.sum() + 2 * k.sum() + v.sum()
        elif layout == "transposed":
            loss = (q.transpose(0, 1) * weight).sum() + k.mT.tanh().sum() + v.sum()
        else:
            loss = q[:, ::2].sin().sum() + k[0].sum() + v[..., 1::3].sum()
        loss.backward()
        found.append({"dX": x.grad} | gradients(model))
    assert q.grad_fn is k.grad_fn is v.grad_fn
    assert_near_exact(found[1], found[0])


def test_outputs_share_no_storage_and_may_be_changed_in_place():
    stock, ours = owner_twins(P64)
    learn(ours, owner_input(P64))
    found = []
    for model in (stock, ours):
        outputs = model(owner_input(P64))
        assert len({y.untyped_storage().data_ptr() for y in outputs.values()}) == 3
        outputs["q_proj"].mul_(3)
        backward(outputs)
        found.append({name: y.detach() for name, y in outputs.items()} | gradients(model))
    assert outputs["k_proj"].grad_fn is outputs["v_proj"].grad_fn
    assert_near_exact(found[1], found[0])


@pytest.mark.parametrize("setup", [P, Setup(quant="nf4"), NF4], ids=str)
def test_backward_reads_nothing_but_saved_tensors(setup):
    """Behaviour 18."""
    model = _learned(setup)
    expected = owner_step(model, owner_input(setup))
    x = owner_input(setup)
    with cloned_saves():
        outputs = model(x)
    assert shared(outputs) == TOGETHER
    values = {name: y.detach() for name, y in outputs.items()}
    with poisoned([x, *(t for name in MEMBERS for t in originals(layer_of(model, name)))]):
        backward(outputs)
    assert_equal(values | {"dX0": x.grad} | gradients(model), expected)
