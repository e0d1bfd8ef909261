"""Activation checkpointing: the forward runs again in backward, on the same tensors."""

from __future__ import annotations

import gc

import pytest
import torch
from counting import LiveBytes
from models import (
    NF4,
    P64,
    fused_members,
    gradients,
    llama,
    one_projection,
    random_cotangent,
    random_input,
    taken,
    tokens,
)
from oracle import assert_equal
from peft import LoraConfig
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from peft_fastlora import FastLoraConfig

BLOCKS = {
    "ours last": lambda model, x: model(x.tanh()),
    "ours first": lambda model, x: model(x).tanh(),
    "ours alone": lambda model, x: model(x),
    "ours twice": lambda model, x: model(x) * model(x.sin()),
}
SETUPS = pytest.mark.parametrize("setup", [P64, NF4], ids=str)


def _step(model, setup, block, **checkpointing):
    x = random_input(setup)
    y = checkpoint(block, model, x, **checkpointing) if checkpointing else block(model, x)
    y.backward(random_cotangent(y))
    return {"y": y.detach(), "dX": x.grad} | gradients(model)


@SETUPS
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("early_stop", [True, False], ids=["early stop", "no early stop"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointed_gradients_equal_plain_ones(setup, block, early_stop, reentrant):
    model = one_projection(FastLoraConfig, setup)
    assert taken(model(random_input(setup)))
    expected = _step(model, setup, BLOCKS[block])
    with set_checkpoint_early_stop(early_stop):
        found = _step(model, setup, BLOCKS[block], use_reentrant=reentrant)
    assert len(found) == 4
    assert_equal(found, expected)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_llama_with_gradient_checkpointing_trains_to_stock_gradients(reentrant):
    found = []
    for config_class in (LoraConfig, FastLoraConfig):
        model = llama(config_class).double().train()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        assert model.base_model.model.model.gradient_checkpointing
        model(tokens(), labels=tokens()).loss.backward()
        found.append(gradients(model))
    assert len(fused_members(model)) == 14
    stock, ours = found
    assert len(ours) == 28
    for name in stock:
        torch.testing.assert_close(ours[name], stock[name], rtol=1e-9, atol=1e-12)


@SETUPS
@pytest.mark.parametrize("mode", ["plain", "reentrant", "non-reentrant"])
def test_live_memory_is_flat_over_thirty_steps(setup, mode):
    """Nothing outlives its step: no cache keyed by call, no cycle through a node."""
    model = one_projection(FastLoraConfig, setup)
    checkpointing = {} if mode == "plain" else {"use_reentrant": mode == "reentrant"}
    levels = []
    gc.disable()  # what only the garbage collector would free counts as kept
    try:
        with LiveBytes() as live:
            for _ in range(30):
                _step(model, setup, BLOCKS["ours last"], **checkpointing)
                levels.append(live.bytes)
    finally:
        gc.enable()
    assert set(levels[2:]) == {levels[2]}


def test_live_bytes_sees_a_leak():
    """The instrument of the test above."""
    leaked = []
    levels = []
    with LiveBytes() as live:
        for _ in range(3):
            leaked.append((torch.ones(100, requires_grad=True) * 2).sum().grad_fn)
            levels.append(live.bytes)
        leaked.clear()
        levels.append(live.bytes)
    assert levels[0] < levels[1] < levels[2]
    assert levels[3] < levels[0]
