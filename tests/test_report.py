"""`fusion_report`: what is announced is what happens, every adapted layer exactly once."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lifecycle_models import (
    FUSED_NODES,
    LLAMA_TARGETS,
    NET_NAMES,
    Twins,
    llama_input,
    lora_modules,
    make_llama,
    make_net,
    make_twins,
    net_input,
    run,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from peft_fastlora import FastLoraConfig, FusionReport, fuse, fusion_report, unfuse


def announced(model: nn.Module) -> dict[str, str]:
    return {name: row.path for row in fusion_report(model).rows for name in row.members}


def taken(model: nn.Module, x: Tensor) -> dict[str, str]:
    return {name: "fused" if node in FUSED_NODES else "stock" for name, node in run(model, x).nodes.items()}


def llama_twins(**lora: Any) -> Twins:
    return make_twins(make_llama, target_modules=LLAMA_TARGETS, **lora)


# -- announced is taken ----------------------------------------------------------------------------------------------


def attention(model: nn.Module, layer: int = 0) -> Any:
    return model.base_model.model.model.layers[layer].self_attn


def hook_one(model: nn.Module) -> str:
    attention(model).q_proj.lora_A["default"].register_forward_hook(lambda *_: None)
    return "lora_A has hooks"


def train_one_base(model: nn.Module) -> str:
    attention(model).q_proj.base_layer.weight.requires_grad_(True)
    return "the base weight is trainable"


def merge_one(model: nn.Module) -> str:
    attention(model).q_proj.merge()
    return "an adapter is merged into the base weight"


def disable_one(model: nn.Module) -> str:
    attention(model).q_proj.enable_adapters(False)
    return "the adapters are disabled"


def replace_one_forward(model: nn.Module) -> str:
    layer = attention(model).q_proj
    layer.forward = types.MethodType(lambda self, x: self.base_layer(x), layer)
    return "the forward of the layer was replaced on the instance"


CAUSES = [hook_one, train_one_base, merge_one, disable_one, replace_one_forward]


def test_all_layers_of_a_llama_are_announced_and_taken_before_and_after_training() -> None:
    model, x = llama_twins().fast, llama_input()
    expected = dict.fromkeys(lora_modules(model), "fused")
    assert len(expected) == 14
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(3):
        assert announced(model) == expected
        assert taken(model, x) == expected
        optimizer.step()
    assert announced(model) == expected


@pytest.mark.parametrize("cause", CAUSES)
def test_one_layer_that_steps_aside_is_announced_with_its_reason(cause: Callable[[nn.Module], str]) -> None:
    model, x = llama_twins().fast, llama_input()
    reason = cause(model)
    stock = [row for row in fusion_report(model).rows if row.path == "stock"]
    assert [(row.name, row.reason) for row in stock] == [("base_model.model.model.layers.0.self_attn.q_proj", reason)]
    before = announced(model)
    assert taken(model, x) == before
    assert announced(model) == before


def stock_reasons(model: nn.Module) -> dict[str, str | None]:
    rows = [row for row in fusion_report(model).rows if row.path == "stock"]
    return {row.name.rpartition("layers.")[2]: row.reason for row in rows}


def test_every_layer_that_steps_aside_has_its_own_reason() -> None:
    model, x = llama_twins(lora_dropout=0.1).fast, llama_input()
    attention(model, 1).k_proj.lora_B["default"].register_forward_hook(lambda *_: None)
    attention(model, 1).v_proj.merge()
    model.eval()
    expected = {
        "1.self_attn.k_proj": "lora_B has hooks",
        "1.self_attn.v_proj": "an adapter is merged into the base weight",
    }
    assert stock_reasons(model) == expected
    assert taken(model, x) == announced(model)
    assert stock_reasons(model) == expected
    model.train()
    reasons = stock_reasons(model)
    assert reasons.pop("1.self_attn.v_proj") == "an adapter is merged into the base weight"
    for reason in reasons.values():  # where dropout is refused at all
        assert reason in ("lora_B has hooks", "lora_dropout of adapter 'default' is active (p = 0.1)")
    assert taken(model, x) == announced(model)


def test_partial_targets_cover_the_adapted_layers_only() -> None:
    model, x = make_twins(make_llama, target_modules=["q_proj", "v_proj"]).fast, llama_input()
    assert announced(model) == dict.fromkeys(lora_modules(model), "fused")
    assert len(announced(model)) == 4
    assert taken(model, x) == announced(model)


# -- what the report looks like --------------------------------------------------------------------------------------


def test_rows_cover_every_adapted_layer_exactly_once() -> None:
    model = llama_twins().fast
    members = [name for row in fusion_report(model).rows for name in row.members]
    assert sorted(members) == sorted(lora_modules(model))
    assert len(set(members)) == len(members) == 14
    assert all(row.members == (row.name,) for row in fusion_report(model).rows if row.kind == "linear")


def test_counts_and_to_dict() -> None:
    model = make_twins().fast
    model.base_model.model.second.merge()
    report = fusion_report(model)
    assert isinstance(report, FusionReport)
    assert report.counts == {("linear", "fused"): 2, ("linear", "stock"): 1}
    assert (
        json.loads(json.dumps(report.to_dict()))
        == report.to_dict()
        == {
            "rows": [
                {
                    "name": f"base_model.model.{name}",
                    "kind": "linear",
                    "path": "stock" if name == "second" else "fused",
                    "reason": "an adapter is merged into the base weight" if name == "second" else None,
                    "members": [f"base_model.model.{name}"],
                }
                for name in NET_NAMES
            ],
            "counts": {"linear/fused": 2, "linear/stock": 1},
        }
    )


def test_str_is_a_table_with_totals() -> None:
    model = make_twins().fast
    model.base_model.model.second.merge()
    assert str(fusion_report(model)).splitlines() == [
        "name                     kind    path   reason",
        "base_model.model.first   linear  fused",
        "base_model.model.second  linear  stock  an adapter is merged into the base weight",
        "base_model.model.third   linear  fused",
        "total: 2 linear fused, 1 linear stock",
    ]


def test_asking_changes_nothing() -> None:
    twins = make_twins()
    before = {name: dict(module.__dict__) for name, module in twins.fast.named_modules()}
    report = fusion_report(twins.fast)
    assert fusion_report(twins.fast) == report
    for name, module in twins.fast.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        assert all(module.__dict__[key] is value for key, value in before[name].items()), name


def test_fuse_returns_the_report() -> None:
    model = get_peft_model(make_net(), LoraConfig(r=4, target_modules=list(NET_NAMES)))
    assert fuse(model) == fusion_report(model)


# -- layers that are stock -------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """An embedding, a convolution and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 24)
        self.conv = nn.Conv1d(24, 24, 1)
        self.proj = nn.Linear(24, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.proj(self.conv(self.tokens(ids).transpose(1, 2)).transpose(1, 2))


def test_embeddings_and_convolutions_are_stock_and_say_so() -> None:
    torch.manual_seed(0)
    model = get_peft_model(Mixed(), FastLoraConfig(r=4, target_modules=["tokens", "conv", "proj"]))
    rows = {row.name.rpartition(".")[2]: (row.path, row.reason) for row in fusion_report(model).rows}
    assert rows == {
        "tokens": ("stock", "there is no fast version of peft.tuners.lora.layer.Embedding"),
        "conv": ("stock", "there is no fast version of peft.tuners.lora.layer.Conv1d"),
        "proj": ("fused", None),
    }
    nodes = run(model, torch.arange(10).reshape(2, 5)).nodes
    assert {name.rpartition(".")[2]: node in FUSED_NODES for name, node in nodes.items()} == {
        "tokens": False,
        "conv": False,
        "proj": True,
    }


def test_layers_of_a_stock_model_say_how_to_make_them_fast() -> None:
    model = get_peft_model(make_net(), LoraConfig(r=4, target_modules=list(NET_NAMES)))
    report = fusion_report(model)
    assert {(row.path, row.reason) for row in report.rows} == {
        ("stock", "the layer is stock PEFT's; fuse(model) makes it fast")
    }
    fuse(model)
    assert {(row.path, row.reason) for row in fusion_report(model).rows} == {("fused", None)}
    unfuse(model)
    assert fusion_report(model) == report


def test_report_names_are_relative_to_the_module_asked() -> None:
    model = make_twins().fast
    assert [row.name for row in fusion_report(model.base_model.model).rows] == list(NET_NAMES)
    (row,) = fusion_report(model.base_model.model.first).rows
    assert (row.name, row.path) == ("", "fused")
    assert taken(model, net_input()) == announced(model)
