"""What can go wrong between two projections that read one tensor (and must not).

Owners here first learn that q, k and v read one tensor; then something else happens. The outputs and every gradient
equal stock's each time, and `log` says which node made what: silently computing all alone would pass no test.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from contextlib import contextmanager

import pytest
import torch
from counting import LiveBytes, Operators
from models import P64, autocast, cast_adapters, gradients, layer_of, llama, tokens
from oracle import assert_equal, assert_near_exact
from owners import (
    ALONE,
    MEMBERS,
    TOGETHER,
    Owner,
    announced,
    assert_agree,
    backward,
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
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from peft_fastlora import FastLoraConfig, fuse, fusion_report, unfuse
from peft_fastlora.scope import open_scopes

Q, K, V = MEMBERS
GIVEN_UP = "its owner called it with other tensors than its siblings from time to time"


@pytest.fixture(autouse=True)
def no_scope_stays_open():
    yield
    assert open_scopes() == []


def _x(seed=0):
    return owner_input(P64, seed=seed)


def _learned_twins(**lora):
    stock, ours = owner_twins(P64, **lora)
    learn(ours, _x())
    return stock, ours


# -- x is changed in place between two members ------------------------------------------------------------------------


def _add(x):
    x.add_(1)


def _add_without_grad(x):
    with torch.no_grad():
        x.add_(1)


def _add_to_a_view(x):
    x.view(-1)[:7].add_(1)


def _add_to_a_view_without_grad(x):
    with torch.no_grad():
        x[0].add_(1)


def _add_to_a_detached_alias(x):
    x.detach().add_(1)


CHANGES = [_add, _add_without_grad, _add_to_a_view, _add_to_a_view_without_grad, _add_to_a_detached_alias]


def _changing(change, after=Q):
    def script(owner, x):
        x = x * 1  # a leaf that wants a gradient must not be changed in place
        outputs = {}
        for name in MEMBERS:
            outputs[name] = owner.get_submodule(name)(x)
            if name == after:
                change(x)
        return outputs

    return script


@pytest.mark.parametrize("after", [Q, K])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_change_of_x_between_two_members(change, after):
    """The outputs are of the x of each call; backward refuses, as stock's does, since x was overwritten."""
    stock, ours = _learned_twins()
    still_together = {(K, V), (Q,)} if after == Q else {(Q, K), (V,)}
    set_script(_changing(change, after), stock, ours)
    for nodes in (ALONE if after == Q else still_together, still_together):
        expected, found = stock(_x()), ours(_x())
        assert_near_exact(found, expected)
        assert owner_of(ours).log[-1] == nodes
        for outputs in (expected, found):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                backward(outputs)
    gradients(stock), gradients(ours)  # of what came before the refusal
    set_script(together, stock, ours)
    assert_agree(stock, ours, _x(), nodes=still_together)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("born", ["inside", "outside"])
def test_change_of_x_without_a_graph(mode, change, born):
    """Also where x is an inference tensor, which has no version: then nothing is learned and nothing used."""
    stock, ours = _learned_twins()

    def script(owner, x):
        if born == "inside":
            x = x.clone()
        outputs = {Q: owner.q_proj(x)}
        change(x)
        return outputs | {K: owner.k_proj(x), V: owner.v_proj(x)}

    set_script(script, stock, ours)
    for _ in range(3):
        found = []
        for model in (stock, ours):
            x = _x().detach()
            with mode():
                found.append(model(x))
        assert_near_exact(found[1], found[0])
    set_script(together, stock, ours)
    unseen = mode is torch.inference_mode and born == "inside"
    assert_agree(stock, ours, _x(), nodes=TOGETHER if unseen else {(Q,), (K, V)})


# -- called in other ways ---------------------------------------------------------------------------------------------


def _calls(*steps):
    """Calls members: "q" with x, "q'" with another tensor of equal shape and "q=" with an equal one."""

    def script(owner, x):
        tensors = {"": x, "'": x.tanh(), "=": x.clone()}
        outputs = {}
        for i, step in enumerate(steps):
            outputs[f"{i}{step}"] = owner.get_submodule(f"{step[0]}_proj")(tensors[step[1:]])
        return outputs

    return script


# calls; the nodes the first time; the nodes from the second time on
OTHER_CALLS = [
    ("q k v", "qkv", "qkv"),
    ("v q k", "vqk", "vqk"),
    ("k v q", "kvq", "kvq"),
    ("q q k v", "qkv q", "q q kv"),
    ("q k q v", "qkv q", "q q kv"),
    ("q k v v", "qkv v", "qk v v"),
    ("q k v q k v", "qkv q k v", "qkv q k v"),
    ("q k' v", "qv k", "qv k"),
    ("q k= v", "qv k", "qv k"),
    ("q' k v", "q k v", "q kv"),
    ("q k v'", "qk v", "qk v"),
    ("q' k' v", "qk v", "qk v"),
    ("q' k' v'", "qkv", "qkv"),
    ("q' k= v", "q k v", "q k v"),
    ("q' q k v", "q q k v", "q q kv"),
    ("q k' k v", "qv k k", "qv k k"),
    ("q k", "qk", "qk"),
    ("q v", "qv", "qv"),
    ("v k", "vk", "vk"),
    ("q", "q", "q"),
    ("q' q", "q q", "q q"),
]


def _nodes(log_entry):
    return sorted("".join(name[1] for name in group) for group in log_entry)


@pytest.mark.parametrize("calls, first, later", OTHER_CALLS, ids=[row[0] for row in OTHER_CALLS])
def test_other_calls_than_learned(calls, first, later):
    stock, ours = _learned_twins()
    set_script(_calls(*calls.split()), stock, ours)
    for nodes in (first, later, later):
        expected, found = owner_step(stock, _x()), owner_step(ours, _x())
        assert_near_exact(found, expected)
        assert _nodes(owner_of(ours).log[-1]) == sorted(nodes.split())
    set_script(together, stock, ours)
    for _ in range(3):
        assert_near_exact(owner_step(ours, _x()), owner_step(stock, _x()))


@pytest.mark.parametrize("calls", [row[0] for row in OTHER_CALLS])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad], ids=["grad", "no_grad"])
def test_nothing_is_thrown_away_twice(calls, mode):
    """A wrong guess costs at most two products once; from then on no product more than stock."""
    stock, ours = _learned_twins()
    set_script(_calls(*calls.split()), stock, ours)
    counts = []
    with mode():
        for _ in range(5):
            step = []
            for model in (stock, ours):
                with Operators() as operators:
                    model(_x())
                step.append(len(operators.products))
            counts.append(step[1] - step[0])
    assert counts[0] <= 4
    assert max(counts[1:]) <= 0


def test_what_alternates_is_given_up_after_two_mistakes_with_a_reason():
    stock, ours = _learned_twins()
    scripts = [_calls("q", "k"), _calls("q", "v"), _calls("q", "k", "v")]
    waste = 0
    for step in range(12):
        set_script(scripts[step % 3], stock, ours)
        counts = []
        for model in (stock, ours):
            with torch.no_grad(), Operators() as operators:
                outputs = model(_x())
            counts.append((len(operators.products), outputs))
        assert_near_exact(counts[1][1], counts[0][1])
        waste += max(0, counts[1][0] - counts[0][0])
    assert waste <= 4
    assert_near_exact(owner_step(ours, _x()), owner_step(stock, _x()))
    assert _nodes(owner_of(ours).log[-1]) == ["k", "q", "v"]
    assert reasons(ours) == dict.fromkeys(MEMBERS, GIVEN_UP)
    assert announced(ours) == dict.fromkeys(MEMBERS, "linear/fused")


def test_given_up_is_final_until_the_model_is_made_fast_anew():
    stock, ours = _learned_twins()
    for calls in ("q k", "q", "q k v", "q k v", "q k v"):
        set_script(_calls(*calls.split()), stock, ours)
        assert_near_exact(owner_step(ours, _x()), owner_step(stock, _x()))
    assert _nodes(owner_of(ours).log[-1]) == ["k", "q", "v"]
    copied = copy.deepcopy(ours)
    assert reasons(copied) == dict.fromkeys(MEMBERS, GIVEN_UP)
    unfuse(ours)
    assert not [key for key in owner_of(ours).__dict__ if key.startswith("fast_lora")]


def test_a_group_is_learned_anew_once_and_then_given_up_with_a_reason():
    """After two mistakes nothing is ever grouped again: the report must not be silent about it."""
    _, ours = _learned_twins()
    for grouped_again in (True, False):
        set_script(_calls("q"), ours)
        ours(_x())
        set_script(together, ours)
        for _ in range(3):
            ours(_x())
        assert (owner_of(ours).log[-1] != ALONE) is grouped_again
    assert all(reasons(ours).values())


def test_what_was_right_about_a_mistake_is_kept_for_good():
    """A sibling that was called with another tensor once does not come back, so it can be wrong only once."""
    stock, ours = _learned_twins()
    set_script(_calls("q", "k=", "v"), stock, ours)
    assert_near_exact(owner_step(ours, _x()), owner_step(stock, _x()))
    set_script(together, stock, ours)
    for _ in range(3):
        assert_agree(stock, ours, _x(), nodes={(Q, V), (K,)})


# -- exceptions -------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def _raising(after):
    def script(owner, x):
        for name in MEMBERS:
            owner.get_submodule(name)(x)
            if name == after:
                raise Stop
        raise AssertionError

    return script


@pytest.mark.parametrize("after", MEMBERS)
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "first"])
def test_exception_between_two_members(after, learned):
    """The scope ends; the same tensor comes again and is computed again."""
    stock, ours = _learned_twins() if learned else owner_twins(P64)
    set_script(_raising(after), ours)
    x = _x()
    for _ in range(3):
        with pytest.raises(Stop):
            ours(x)
        assert open_scopes() == []
    with torch.no_grad():
        x.mul_(2)
    set_script(together, ours)
    if not learned:
        assert_agree(stock, ours, x, nodes=ALONE)
    assert_agree(stock, ours, x, nodes=TOGETHER)


def test_nothing_is_alive_after_an_exception():
    _, ours = _learned_twins()
    born = []

    def script(owner, x):
        born.extend([weakref.ref(x), weakref.ref(owner.q_proj(x))])
        born.extend(weakref.ref(pending.output) for pending in open_scopes()[-1].pending.values())
        raise Stop

    set_script(script, ours)
    gc.disable()
    try:
        with pytest.raises(Stop):
            ours(_x() * 1)
        assert len(born) == 4
        assert [ref for ref in born if ref() is not None] == []
    finally:
        gc.enable()


def test_the_same_tensor_in_the_next_forward_is_computed_again():
    """As checkpoint recomputation does; also after the weights have changed."""
    stock, ours = _learned_twins()
    x = _x()
    ours(x)
    for model in (stock, ours):
        for name in MEMBERS:
            layer_of(model, name).lora_B.default.weight.data.mul_(2)
    assert_agree(stock, ours, x, nodes=TOGETHER)
    expected, found = stock(x), ours(x)
    assert_near_exact({n: y.detach() for n, y in found.items()}, {n: y.detach() for n, y in expected.items()})


# -- nothing outlives a forward ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", ["q k v", "q k", "q k' v", "q"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_forward_without_backward_leaves_nothing_alive(calls, mode):
    _, ours = _learned_twins()
    set_script(_calls(*calls.split()), ours)
    gc.disable()
    try:
        with mode():
            x = _x() * 1
            outputs = ours(x)
        born = [weakref.ref(x), *(weakref.ref(y) for y in outputs.values())]
        nodes = [weakref.ref(y.grad_fn) for y in outputs.values() if y.grad_fn is not None]
        assert all(ref() is not None for ref in born)
        assert bool(nodes) is (mode is torch.enable_grad)
        del x, outputs
        assert [ref for ref in born + nodes if ref() is not None] == []
    finally:
        gc.enable()


@contextmanager
def _without_collector():
    """What only the garbage collector would free counts as kept."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


STEPS = {
    "step": lambda model: backward(model(_x())),
    "no backward": lambda model: model(_x()),
    "no grad": lambda model: torch.no_grad()(model)(_x()),
    "reentrant": lambda model: backward(_checkpointed(model, _x(), use_reentrant=True)),
    "non-reentrant": lambda model: backward(_checkpointed(model, _x(), use_reentrant=False)),
    "non-reentrant, no backward": lambda model: _checkpointed(model, _x(), use_reentrant=False),
}


@pytest.mark.parametrize("calls", ["q k v", "q k", "q k' v"])
@pytest.mark.parametrize("step", STEPS)
def test_live_memory_is_flat_over_thirty_steps(step, calls):
    model = make_owner(FastLoraConfig, P64)
    levels = []
    with _without_collector(), LiveBytes() as live:
        for i in range(30):
            set_script(_calls(*calls.split()) if i > 1 else together, model)
            STEPS[step](model)
            gradients(model)
            owner_of(model).log.clear()
            levels.append(live.bytes)
    assert set(levels[4:]) == {levels[4]}
    assert levels[4] == levels[0]


# -- threads and replicas ---------------------------------------------------------------------------------------------


def _run_threads(functions):
    """Run each in a thread of its own; what they return."""
    results = [None] * len(functions)

    def run(i, function):
        try:
            results[i] = function()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "first"])
def test_two_threads_run_one_module_at_once(learned):
    """Both are between q and k at the same time, each with its own tensor of equal shape."""
    stock, ours = _learned_twins() if learned else owner_twins(P64)
    barrier = threading.Barrier(2)

    def script(owner, x):
        outputs = {}
        for name in MEMBERS:
            outputs[name] = owner.get_submodule(name)(x)
            barrier.wait(60)
        return outputs

    set_script(script, ours)
    for _ in range(3):
        outputs = _run_threads([lambda seed=seed: ours(_x(seed)) for seed in (1, 2)])
        for seed, found in zip((1, 2), outputs, strict=True):
            expected = stock(_x(seed))
            assert_near_exact(found, expected)
    assert owner_of(ours).log[-2:] == [TOGETHER, TOGETHER]
    assert shared(outputs[0]) == shared(outputs[1]) == TOGETHER
    assert outputs[0][Q].grad_fn is not outputs[1][Q].grad_fn


def test_threads_in_different_modes():
    """Grad mode and autocast belong to a thread, and so does what is pending."""
    stock, ours = _learned_twins()
    barrier = threading.Barrier(2)

    def script(owner, x):
        outputs = {}
        for name in MEMBERS:
            outputs[name] = owner.get_submodule(name)(x)
            barrier.wait(60)
        return outputs

    set_script(script, ours)
    x = _x()
    with_grad, without = _run_threads([lambda: ours(x), lambda: torch.no_grad()(ours)(x)])
    assert shared(with_grad) == TOGETHER
    assert not any(y.requires_grad for y in without.values())
    assert_near_exact(with_grad, stock(x))
    assert_near_exact(without, stock(x))


def _replica(model):
    """What `torch.nn.parallel.replicate` makes for a device: other module objects, parameters as plain tensors."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in copies.items():
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else copies[child]
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else parameter * 1)
    return copies[model]


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "first"])
def test_replicas_in_threads(learned):
    """`nn.DataParallel`: the gradients of the replicas add up in the parameters of the module."""
    stock, ours = _learned_twins() if learned else owner_twins(P64)
    expected = [owner_step(stock, _x(seed)) for seed in (1, 2)]
    replicas = [_replica(owner_of(ours)) for _ in (1, 2)]
    for replica in replicas:
        replica.log = []
        assert replica.q_proj is not owner_of(ours).q_proj
        assert type(replica.q_proj.lora_A.default.weight) is torch.Tensor
    outputs = _run_threads([lambda r=r, seed=seed: r(_x(seed)) for r, seed in zip(replicas, (1, 2), strict=True)])
    for found in outputs:
        backward(found)
    assert [replica.log[-1] for replica in replicas] == [TOGETHER if learned else ALONE] * 2
    for found, values in zip(outputs, expected, strict=True):
        assert_near_exact(found, {name: values[name] for name in MEMBERS})
    names = [name for name in expected[0] if name.startswith("base_model")]
    assert len(names) == 6
    assert_near_exact(gradients(ours), {name: expected[0][name] + expected[1][name] for name in names})


# -- checkpointing ----------------------------------------------------------------------------------------------------


def _checkpointed(model, x, **kwargs):
    """The outputs by name; the tensors pass through `checkpoint` as a tuple."""
    names = []

    def run(x):
        outputs = model(x)
        names[:] = outputs
        return tuple(outputs.values())

    ys = checkpoint(run, x, **kwargs)
    return dict(zip(names, ys, strict=True))


CHECKPOINTS = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "non-reentrant, no early stop": {"use_reentrant": False},
}


@pytest.fixture(params=CHECKPOINTS)
def checkpointing(request):
    with set_checkpoint_early_stop("no early stop" not in request.param):
        yield CHECKPOINTS[request.param]


def _checkpointed_step(model, checkpointing, seed=0, x=None):
    x = _x(seed) if x is None else x
    outputs = _checkpointed(model, x, **checkpointing)
    backward(outputs, seed)
    found = {name: y.detach() for name, y in outputs.items()} | {"dX0": x.grad}
    return found | gradients(model)


def test_checkpointed_steps_from_the_very_first_on(checkpointing):
    stock, ours = owner_twins(P64)
    for step in range(4):
        expected = owner_step(stock, _x(step), seed=step)
        assert_near_exact(_checkpointed_step(ours, checkpointing, step), expected)
    log = [entry for entry in owner_of(ours).log if entry]
    assert log[0] in (ALONE, TOGETHER)  # reentrant: the very first forward has no graph, its recomputation has
    assert TOGETHER in log
    assert announced(ours) == dict.fromkeys(MEMBERS, "shared_input/fused")


def test_recomputation_brings_the_same_tensor_and_is_computed_again(checkpointing):
    stock, ours = _learned_twins()
    expected = owner_step(stock, _x())
    x = _x()
    with Operators() as forward:
        outputs = _checkpointed(ours, x, **checkpointing)
    with Operators() as backward_operators:
        backward(outputs)
    assert_near_exact({"dX0": x.grad} | gradients(ours), {k: v for k, v in expected.items() if k not in MEMBERS})
    assert len(forward.products) == 7
    assert len(backward_operators.products) == 7 + 11


@pytest.mark.parametrize("order", [(0, 1), (1, 0), "sum"], ids=str)
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "first"])
def test_two_checkpointed_forwards_before_one_backward(checkpointing, order, learned):
    """The pattern that the first taught must not be used in the recomputation of either."""
    stock, ours = _learned_twins() if learned else owner_twins(P64)
    expected = [owner_step(stock, _x(seed), seed=seed) for seed in (0, 1)]
    xs = [_x(0), _x(1)]
    outputs = [_checkpointed(ours, x, **checkpointing) for x in xs]
    if order == "sum":
        backward({f"{name}{seed}": y for seed in (0, 1) for name, y in outputs[seed].items()}, 0)
        with pytest.raises(RuntimeError, match="second time"):
            backward(outputs[0])
        gradients(ours)
    else:
        for seed in order:
            backward(outputs[seed], seed)
            found = {n: y.detach() for n, y in outputs[seed].items()} | {"dX0": xs[seed].grad} | gradients(ours)
            assert_near_exact(found, expected[seed])
    for _ in range(2):
        assert_near_exact(_checkpointed_step(ours, checkpointing, 0), expected[0])
    assert [entry for entry in owner_of(ours).log if entry][-1] == TOGETHER


def test_pattern_learned_by_others_between_a_checkpointed_forward_and_its_backward(checkpointing):
    """Validation runs, or a forward without checkpointing, come between."""
    stock, ours = owner_twins(P64)
    expected = owner_step(stock, _x())
    x = _x()
    outputs = _checkpointed(ours, x, **checkpointing)
    for _ in range(2):
        ours(_x(1))
        with torch.no_grad():
            ours(_x(2))
        assert_near_exact(owner_step(ours, _x()), expected)
    backward(outputs)
    assert_near_exact({n: y.detach() for n, y in outputs.items()} | {"dX0": x.grad} | gradients(ours), expected)
    assert_agree(stock, ours, _x(), nodes=TOGETHER)


@pytest.mark.parametrize("calls", ["v q k", "q k q v", "q k' v", "q' k v", "q' k' v'", "q k", "q"])
def test_calls_that_change_under_checkpointing(checkpointing, calls):
    stock, ours = _learned_twins()
    set_script(_calls(*calls.split()), stock, ours)
    for step in range(3):
        expected = owner_step(stock, _x(step), seed=step)
        assert_near_exact(_checkpointed_step(ours, checkpointing, step), expected)
    set_script(together, stock, ours)
    for step in range(3):
        expected = owner_step(stock, _x(step), seed=step)
        assert_near_exact(_checkpointed_step(ours, checkpointing, step), expected)


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "first"])
def test_second_backward_through_a_checkpoint(learned):
    """With `retain_graph=True` non-reentrant checkpointing runs the forward again for each backward."""
    stock, ours = _learned_twins() if learned else owner_twins(P64)
    expected = owner_step(stock, _x())
    x = _x()
    outputs = _checkpointed(ours, x, use_reentrant=False)
    for _ in range(3):
        backward(outputs, retain_graph=True)
        found = {name: y.detach() for name, y in outputs.items()} | {"dX0": x.grad} | gradients(ours)
        assert_near_exact(found, expected)
        x.grad = None


def test_forward_between_two_backwards_through_a_checkpoint():
    stock, ours = owner_twins(P64)
    expected = owner_step(stock, _x())
    x = _x()
    outputs = _checkpointed(ours, x, use_reentrant=False)
    backward(outputs, retain_graph=True)
    gradients(ours)
    x.grad = None
    ours(_x(1))
    backward(outputs)
    assert_near_exact({n: y.detach() for n, y in outputs.items()} | {"dX0": x.grad} | gradients(ours), expected)


def _freeze_q(model):
    layer_of(model, Q).lora_A.requires_grad_(False)
    layer_of(model, Q).lora_B.requires_grad_(False)


def _adapter_without_q(model):
    config_class = FastLoraConfig if isinstance(model.peft_config["default"], FastLoraConfig) else LoraConfig
    torch.manual_seed(1)
    model.add_adapter("other", config_class(r=2, target_modules=[K, V], init_lora_weights=False))
    cast_adapters(model, torch.float64)
    model.set_adapter("other")


def _nothing(model):
    pass


def _drop_q(outputs):
    return {K: outputs[K], V: outputs[V]}


def _detach_q(outputs):
    return outputs | {Q: outputs[Q].detach()}


def _keep_all(outputs):
    return outputs


@pytest.mark.parametrize(
    "prepare, use",
    [(_freeze_q, _keep_all), (_adapter_without_q, _keep_all), (_nothing, _drop_q), (_nothing, _detach_q)],
    ids=["q frozen", "no adapter for q", "q dropped", "q detached"],
)
def test_first_member_without_a_graph_under_checkpointing(checkpointing, prepare, use):
    """The forward waits for its backward whichever of its outputs is part of the graph."""
    stock, ours = owner_twins(P64)
    x = _x().detach()  # as without `enable_input_require_grads`
    if checkpointing["use_reentrant"]:
        x.requires_grad_()  # or nothing would be trained
    for model in (stock, ours):
        prepare(model)
        set_script(lambda owner, x: use(together(owner, x)), model)
    for _ in range(3):
        expected = owner_step(stock, x)
        x.grad = None
        outputs = _checkpointed(ours, x, **checkpointing)
        backward(outputs)
        found = {name: y.detach() for name, y in outputs.items()} | gradients(ours)
        assert_near_exact(found | ({} if x.grad is None else {"dX0": x.grad}), expected)
    assert (K, V) in {group[-2:] for group in owner_of(ours).log[-1]}


def test_many_owners_under_one_checkpoint():
    """A Llama whose layers are checkpointed from the first step on, with a validation pass in between."""
    found = []
    for config_class in (LoraConfig, FastLoraConfig):
        model = llama(config_class).double().train()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        steps = []
        for step in range(3):
            loss = model(tokens(seed=step), labels=tokens(seed=step)).loss
            with torch.no_grad():
                model.eval()
                model(tokens(seed=9))
                model.train()
            loss.backward()
            steps.append(gradients(model))
        found.append(steps)
    assert fusion_report(model).counts[("shared_input", "fused")] == 2
    for expected, ours in zip(*found, strict=True):
        assert len(ours) == 28
        for name in expected:
            torch.testing.assert_close(ours[name], expected[name], rtol=1e-9, atol=1e-12)


# -- backward of one output at a time ---------------------------------------------------------------------------------


@pytest.mark.parametrize("under_checkpoint", [False, True], ids=["plain", "checkpoint"])
def test_a_backward_for_each_output(under_checkpoint):
    """As two heads that read one tensor of features, with a loss each. In stock, the graphs have nothing in common.

    A group is one node, whose buffers the first backward frees; with `fuse_qkv=False` it is as in stock.
    """
    stock, ours = owner_twins(P64)
    fuse(ours, fuse_qkv=False)
    for step in range(3):
        found = []
        for model in (stock, ours):
            x = _x(step)
            outputs = _checkpointed(model, x, use_reentrant=False) if under_checkpoint else model(x)
            for name, y in outputs.items():
                backward({name: y}, step)
            found.append({"dX": x.grad} | gradients(model))
        assert len(found[1]) == 7
        assert_near_exact(found[1], found[0])


def test_a_second_backward_through_a_group_needs_retain_graph():
    _, ours = _learned_twins()
    q, k, _ = ours(_x()).values()
    q.sum().backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        k.sum().backward()


def test_an_output_that_needs_no_gradient_alone_needs_none_in_a_group():
    stock, ours = owner_twins(P64)
    for model in (stock, ours):
        _freeze_q(model)
        for _ in range(2):
            outputs = model(_x().detach())
        assert {name: y.requires_grad for name, y in outputs.items()} == {Q: False, K: True, V: True}
    assert shared(outputs) >= {(K, V)}


# -- modes that change between two members ----------------------------------------------------------------------------


def test_grad_mode_changes_between_two_members():
    """q for a frozen reference, k and v for training, on one tensor: neither may get the other's graph."""

    def script(owner, x):
        with torch.no_grad():
            q = owner.q_proj(x)
        return {Q: q, K: owner.k_proj(x), V: owner.v_proj(x)}

    stock, ours = _learned_twins()
    set_script(script, stock, ours)
    for _ in range(3):
        expected, found = owner_step(stock, _x()), owner_step(ours, _x())
        assert_near_exact(found, expected)
    assert len(found) == 3 + 1 + 4
    assert owner_of(ours).log[-3:] in ([{(K,), (V,)}] * 3, [{(K,), (V,)}] + [{(K, V)}] * 2)


def test_grad_mode_comes_off_between_two_members():
    def script(owner, x):
        q = owner.q_proj(x)
        with torch.no_grad():
            return {Q: q, K: owner.k_proj(x), V: owner.v_proj(x)}

    stock, ours = _learned_twins()
    set_script(script, stock, ours)
    for _ in range(3):
        assert_near_exact(owner_step(ours, _x()), owner_step(stock, _x()))
        outputs = ours(_x())
        assert outputs[Q].requires_grad and not outputs[K].requires_grad and not outputs[V].requires_grad


@pytest.mark.parametrize("inside", [Q, K, V])
def test_autocast_changes_between_two_members(inside):
    def script(owner, x):
        outputs = {}
        for name in MEMBERS:
            with autocast(name == inside):
                outputs[name] = owner.get_submodule(name)(x)
        return outputs

    stock, ours = owner_twins()
    learn(ours, owner_input())
    set_script(script, stock, ours)
    for _ in range(3):
        expected, found = stock(owner_input()), ours(owner_input())
        assert {n: y.dtype for n, y in found.items()} == {n: y.dtype for n, y in expected.items()}
        assert found[inside].dtype == torch.bfloat16
        others = [name for name in MEMBERS if name != inside]
        assert_near_exact({n: found[n] for n in others}, {n: expected[n] for n in others})


def test_train_and_eval_change_between_two_members():
    """Dropout of k comes on after q was computed."""
    stock, ours = owner_twins(P64, lora_dropout=0.5)
    for model in (stock, ours):
        model.eval()
    learn(ours, _x())

    def script(owner, x):
        q = owner.q_proj(x)
        owner.k_proj.train()
        return {Q: q, K: owner.k_proj(x), V: owner.v_proj(x)}

    set_script(script, stock, ours)
    for _ in range(3):
        found = []
        for model in (stock, ours):
            model.eval()
            torch.manual_seed(5)
            found.append(owner_step(model, _x()))
        assert_near_exact(found[1], found[0])
    model.eval()
    set_script(together, ours)
    dropped = owner_step(ours, _x())
    assert not torch.allclose(dropped[K], found[1][K])  # dropout did something


def test_active_dropout_runs_stock_in_stocks_order():
    """Same masks for the same seed, before learning and after."""
    stock, ours = owner_twins(P64, lora_dropout=0.5)
    for _ in range(3):
        found = []
        for model in (stock, ours):
            model.train()
            torch.manual_seed(5)
            found.append(owner_step(model, _x()))
        assert_near_exact(found[1], found[0])
    for model in (stock, ours):
        model.eval()
    assert_agree(stock, ours, _x(), nodes=TOGETHER)


def test_x_wants_a_gradient_only_after_q():
    """`requires_grad_()` changes neither identity nor version."""

    def script(owner, x):
        x = x.detach()
        q = owner.q_proj(x)
        x.requires_grad_()
        owner.leaf = [x]
        return {Q: q, K: owner.k_proj(x), V: owner.v_proj(x)}

    stock, ours = _learned_twins()
    set_script(script, stock, ours)
    for _ in range(2):
        found = []
        for model in (stock, ours):
            outputs = model(_x())
            backward(outputs)
            found.append({"dX": owner_of(model).leaf[0].grad} | gradients(model))
        assert found[1]["dX"] is not None
        assert_near_exact(found[1], found[0])


def test_x_is_detached_in_place_after_q():
    def script(owner, x):
        x = x * 1
        q = owner.q_proj(x)
        x.detach_()
        return {Q: q, K: owner.k_proj(x), V: owner.v_proj(x)}

    stock, ours = _learned_twins()
    set_script(script, stock, ours)
    for _ in range(2):
        assert_near_exact(owner_step(ours, _x()), owner_step(stock, _x()))


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.enable_adapters(False),
        lambda layer: layer.set_scale("default", 7),
        lambda layer: layer.merge(),
        lambda layer: layer.base_layer.register_forward_hook(lambda module, args, y: y * 2),
    ],
    ids=["disabled", "scaled", "merged", "hooked"],
)
def test_state_of_a_member_changes_between_two_members(change):
    """Decided at every call: what was computed for k when q was called is not k's result any more."""

    def script(owner, x):
        q = owner.q_proj(x)
        change(owner.k_proj)
        return {Q: q, K: owner.k_proj(x), V: owner.v_proj(x)}

    stock, ours = _learned_twins()
    set_script(script, stock, ours)
    with torch.no_grad():
        assert_near_exact(ours(_x()), stock(_x()))


@pytest.mark.parametrize("born", ["inside", "outside"])
def test_inference_mode(born):
    """Equal results, and no harm for the training that follows."""
    stock, ours = owner_twins(P64)
    outside = _x().detach()
    for step in range(3):
        with torch.inference_mode():
            x = _x().detach().clone() if born == "inside" else outside
            assert_near_exact(ours(x), stock(x))
        if step == 0:
            assert_agree(stock, ours, _x(), nodes=ALONE if born == "inside" else TOGETHER)
        else:
            assert_agree(stock, ours, _x(), nodes=TOGETHER)


# -- owners inside owners, and no owner at all ------------------------------------------------------------------------


class Outer(nn.Module):
    """Owns two projections and an `Owner`; its forward is a script, too."""

    def __init__(self, inner, script):
        super().__init__()
        self.inner = inner
        self.left, self.right = (nn.Linear(24, 8).double() for _ in range(2))
        self.script = script

    def forward(self, x):
        return self.script(self, x)


def _nested(outer, x):
    """One tensor for all five, calls of both owners mixed."""
    left = outer.left(x)
    inner = outer.inner(x)
    return {"left": left, **inner, "right": outer.right(x)}


def _inner_reaches_out(outer, x):
    def script(owner, x):
        return {Q: owner.q_proj(x), "right": outer.right(x), K: owner.k_proj(x), V: owner.v_proj(x)}

    outer.inner.script = script
    left = outer.left(x)
    return {"left": left, **outer.inner(x)}


def _outer_reaches_in(outer, x):
    q = outer.inner.q_proj(x)
    return {"left": outer.left(x), "first q": q, "right": outer.right(x), **outer.inner(x)}


NESTED = {
    _nested: {("left", "right"), MEMBERS},
    _inner_reaches_out: {("left",), ("right",), MEMBERS},
    _outer_reaches_in: {("left", "right"), ("first q",), MEMBERS},
}


@pytest.mark.parametrize("script", NESTED, ids=lambda script: script.__name__)
def test_nested_owners(script):
    found = []
    for config_class in (LoraConfig, FastLoraConfig):
        from models import adapted, base_linear

        torch.manual_seed(0)
        inner = Owner(*(base_linear(P64, 24, out) for out in (16, 8, 8)))
        model = adapted(Outer(inner, script), config_class, P64, [*MEMBERS, "left", "right"], 0)
        for _ in range(3):
            values = owner_step(model, _x())
        found.append(values)
        nodes = shared(model(_x()))
    assert nodes == NESTED[script]
    assert_near_exact(found[1], found[0])


def test_owner_that_calls_itself():
    """A recursive forward: each level has a scope of its own."""

    def script(owner, x, depth=2):
        q = owner.q_proj(x)
        inner = script(owner, x, depth - 1) if depth > 10 else {}
        deeper = owner(x, depth - 1) if depth else {}
        outputs = {f"{depth}{Q}": q, f"{depth}{K}": owner.k_proj(x), f"{depth}{V}": owner.v_proj(x)}
        return outputs | deeper | inner

    stock, ours = _learned_twins()
    set_script(script, stock, ours)
    for _ in range(2):
        assert_near_exact(owner_step(ours, _x()), owner_step(stock, _x()))
    assert owner_of(ours).log[-1] == {tuple(f"{depth}{name}" for name in MEMBERS) for depth in range(3)}


def test_layers_called_outside_their_owner():
    """They compute alone: before, between and after forwards of the owner, with the very tensor that it got."""
    stock, ours = _learned_twins()
    x = _x()
    for _ in range(2):
        for name in (V, Q):
            expected, found = layer_of(stock, name)(x), layer_of(ours, name)(x)
            assert_near_exact({name: found}, {name: expected})
            assert found.grad_fn is not layer_of(ours, name)(x).grad_fn
            assert shared({name: found}) == {(name,)}
        assert_agree(stock, ours, x, nodes=TOGETHER)


def test_layers_called_by_another_thread_while_the_owner_runs():
    stock, ours = _learned_twins()
    x = _x()

    def script(owner, x):
        q = owner.q_proj(x)
        (other,) = _run_threads([lambda: owner.k_proj(x)])
        return {Q: q, "other": other, K: owner.k_proj(x), V: owner.v_proj(x)}

    set_script(script, stock, ours)
    for _ in range(2):
        assert_near_exact(owner_step(ours, x), owner_step(stock, x))
        assert owner_of(ours).log[-1] == TOGETHER | {("other",)} or owner_of(ours).log[-1] == {(Q, K, V), ("other",)}


def test_generator_forward_that_is_left_in_the_middle():
    """An owner whose forward returns before its members are called owns nothing of what happens later."""

    def script(owner, x):
        owner.later = [lambda: owner.k_proj(x)]
        return {Q: owner.q_proj(x)}

    stock, ours = owner_twins(P64, script=script)
    for model in (stock, ours):
        for _ in range(3):
            outputs = model(_x())
            outputs[K] = owner_of(model).later[0]()
        owner_of(model).result = [{name: y.detach() for name, y in outputs.items()}]
    assert shared(outputs) == {(Q,), (K,)}
    assert_near_exact(owner_of(ours).result[0], owner_of(stock).result[0])


# -- members that change under a learned pattern ----------------------------------------------------------------------


def test_member_replaced_by_a_plain_layer():
    stock, ours = _learned_twins()
    for model in (stock, ours):
        owner_of(model).k_proj = owner_of(model).k_proj.base_layer
    assert_agree(stock, ours, _x(), nodes={(Q, V)})
    assert announced(ours) == {Q: "shared_input/fused", V: "shared_input/fused"}


def test_member_removed():
    stock, ours = _learned_twins()
    for model in (stock, ours):
        owner_of(model).k_proj = None
    set_script(lambda owner, x: {Q: owner.q_proj(x), V: owner.v_proj(x)}, stock, ours)
    assert_agree(stock, ours, _x(), nodes={(Q, V)})


def test_member_made_stock():
    stock, ours = _learned_twins()
    unfuse(owner_of(ours).k_proj)
    assert_agree(stock, ours, _x(), nodes={(Q, V)})
    assert announced(ours) == {Q: "shared_input/fused", K: "linear/stock", V: "shared_input/fused"}


def test_member_that_loses_its_adapter():
    stock, ours = _learned_twins()
    for model in (stock, ours):
        layer_of(model, K).delete_adapter("default")
    assert_agree(stock, ours, _x(), nodes={(Q, V)})


def test_forward_of_a_member_replaced_on_the_instance():
    stock, ours = _learned_twins()
    for model in (stock, ours):
        layer = layer_of(model, K)
        layer.forward = lambda x, layer=layer: layer.base_layer(x) * 2
    for _ in range(3):
        assert_near_exact(owner_step(ours, _x()), owner_step(stock, _x()))
    assert (Q, V) in owner_of(ours).log[-1]


def test_forward_of_the_owner_replaced_on_the_instance():
    stock, ours = _learned_twins()
    for model in (stock, ours):
        owner = owner_of(model)
        owner.forward = lambda x, owner=owner: {K: owner.k_proj(x * 2), Q: owner.q_proj(x)}
    for _ in range(2):
        outputs = ours(_x())
        assert_near_exact(outputs, stock(_x()))
        assert shared(outputs) == {(Q,), (K,)}
    assert set(announced(ours).values()) == {"linear/fused"}


def test_adapter_names_for_each_sample():
    """`adapter_names` reaches the members as an argument: no group, stock, right."""
    stock, ours = _learned_twins()
    names = ["default", "__base__"]
    for model in (stock, ours):
        model.eval()
        set_script(lambda owner, x: {n: owner.get_submodule(n)(x, adapter_names=names) for n in MEMBERS}, model)
    x = _x()
    for _ in range(2):
        expected, found = stock(x), ours(x)
        assert_equal({n: y.detach() for n, y in found.items()}, {n: y.detach() for n, y in expected.items()})
    assert owner_of(ours).log[-1] == set()
    set_script(together, stock, ours)
    assert_agree(stock, ours, x, nodes=TOGETHER)


# -- copies -----------------------------------------------------------------------------------------------------------

COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("forwards", [0, 1, 2, 3])
def test_copies_in_the_middle_of_learning(make_copy, forwards):
    """A copy goes on where the original was, and neither knows of the other."""
    stock, ours = owner_twins(P64)
    for _ in range(forwards):
        ours(_x())
    copied = make_copy(ours)
    assert type(owner_of(copied)) is type(owner_of(ours))
    assert fusion_report(copied).rows == fusion_report(ours).rows
    owner_of(copied).log.clear()
    assert_agree(stock, copied, _x(), nodes=TOGETHER if forwards else ALONE)
    assert_agree(stock, copied, _x(), nodes=TOGETHER)
    set_script(_calls("q", "k"), copied)
    copied(_x())
    assert announced(copied)[V] == "linear/fused"
    assert_agree(stock, ours, _x(), nodes=TOGETHER if forwards else ALONE)
    assert_agree(stock, ours, _x(), nodes=TOGETHER)
    unfuse(copied)
    assert type(owner_of(copied)) is Owner
    assert_near_exact(owner_step(copied, _x()), {n: y.detach() for n, y in copied(_x()).items()} | _tail(stock))


def _tail(stock):
    """The gradients of q and k alone, as `copied` with its script gives them."""
    set_script(_calls("q", "k"), stock)
    values = owner_step(stock, _x())
    set_script(together, stock)
    return values


def test_copy_while_a_checkpointed_forward_waits():
    stock, ours = owner_twins(P64)
    expected = owner_step(stock, _x())
    x = _x()
    outputs = _checkpointed(ours, x, use_reentrant=False)
    copied = copy.deepcopy(ours)
    for _ in range(2):
        assert_near_exact(owner_step(copied, _x()), expected)
    backward(outputs)
    found = {n: y.detach() for n, y in outputs.items()} | {"dX0": x.grad} | gradients(ours)
    assert_near_exact(found, expected)


# -- the switch -------------------------------------------------------------------------------------------------------


def test_fuse_qkv_off():
    stock, _ = owner_twins(P64)
    ours = make_owner(FastLoraConfig, P64, fuse_qkv=False)
    for _ in range(3):
        assert_agree(stock, ours, _x(), nodes=ALONE)
    assert announced(ours) == dict.fromkeys(MEMBERS, "linear/fused")
    assert reasons(ours) == dict.fromkeys(MEMBERS, "fuse_qkv is False")


def test_fuse_linear_off_leaves_groups():
    """A group has a switch of its own: observed while its members still run stock."""
    stock, _ = owner_twins(P64)
    ours = make_owner(FastLoraConfig, P64, fuse_linear=False)
    assert_agree(stock, ours, _x(), nodes=set())
    for _ in range(2):
        assert_agree(stock, ours, _x(), nodes=TOGETHER)
