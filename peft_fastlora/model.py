"""`FastLoraModel`, PEFT's LoRA tuner with fast layers, and ways to make an existing model fast or stock again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

from peft import LoraConfig, LoraModel, PeftConfig, PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from torch import nn

from .config import OPTION_NAMES, FastLoraConfig, FastLoraOptions
from .install import install, lora_layers, remove, remove_idle_owners, why_not_installed
from .layer import FastLoraLayer
from .report import NOT_WRAPPED, FusionReport, fusion_report


class FastLoraModel(LoraModel):
    """PEFT's `LoraModel`; its layers are made fast as soon as one adapter has a `FastLoraConfig`.

    With plain `LoraConfig` adapters only, it builds exactly the stock layers.
    """

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """As PEFT's, then make the layers fast. All ways of adding an adapter pass here."""
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        options = _fast_options(self.peft_config)
        if options is None:
            return
        try:
            _check_strict(model, options)
        except RuntimeError:
            self._withdraw(adapter_name)
            raise
        install(model, options)

    def delete_adapter(self, adapter_name: str) -> None:
        """As PEFT's; layers and blocks that lost their last adapter are stock again."""
        super().delete_adapter(adapter_name)
        remove_idle_owners(self.model)

    def _withdraw(self, adapter_name: str) -> None:
        """Take back an adapter that was injected a moment ago."""
        if set(self.peft_config) == {adapter_name}:
            super()._unload_and_optionally_merge(merge=False)
        else:
            self.delete_adapter(adapter_name)

    def _unload_and_optionally_merge(self, *args: Any, **kwargs: Any) -> Any:
        """As PEFT's (`unload`, `merge_and_unload`); no fast class stays behind."""
        model = super()._unload_and_optionally_merge(*args, **kwargs)
        remove(self.model)
        return model


def register(default: bool = False) -> None:
    """Make PEFT build LoRA models with `FastLoraModel`. Importing the package does this; idempotent.

    Args:
        default: also read LoRA configurations from disk as `FastLoraConfig`, so that
            `PeftModel.from_pretrained(base, path)`, `load_adapter` and the `AutoPeftModel` classes give fast models.
            False: as `LoraConfig`, as stock PEFT does.
    """
    PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = FastLoraModel
    PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.LORA] = FastLoraConfig if default else LoraConfig


def unregister() -> None:
    """Give PEFT its own LoRA classes back; idempotent. Models that are fast stay fast."""
    PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = LoraModel
    PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.LORA] = LoraConfig


def fuse(model: nn.Module, **options: Any) -> FusionReport:
    """Make an existing PEFT model with stock LoRA layers fast, in place.

    Args:
        model: what `get_peft_model` or `PeftModel.from_pretrained` returned, or any model with LoRA layers inside.
        options: the options of `FastLoraOptions`, by keyword.

    Returns:
        The report on every adapted layer.

    Raises:
        ValueError: the model has no LoRA layer, or an option is not valid.
        RuntimeError: `strict=True`, and an adapted Linear has no fast version. The model is unchanged in either case.
    """
    unknown = sorted(options.keys() - set(OPTION_NAMES))
    if unknown:
        raise ValueError(f"fuse() has no option {', '.join(map(repr, unknown))}; known: {', '.join(OPTION_NAMES)}")
    chosen = FastLoraOptions(**options)
    chosen.check_options()
    _require_lora(model)
    _check_strict(model, chosen)
    for tuner in _tuners(model, LoraModel):
        tuner.__class__ = FastLoraModel
    _replace_configs(model, lambda config: _as_fast(config, chosen))
    install(model, chosen)
    return fusion_report(model)


def unfuse(model: nn.Module) -> None:
    """Undo `fuse`, or a `FastLoraConfig`: every module, tuner and configuration gets exactly its stock class back.

    Raises:
        ValueError: the model has no LoRA layer.
    """
    _require_lora(model)
    remove(model)
    for tuner in _tuners(model, FastLoraModel):
        tuner.__class__ = LoraModel
    _replace_configs(model, _as_stock)


def _fast_options(configs: Mapping[str, PeftConfig]) -> FastLoraOptions | None:
    """The options of the first adapter that has any. There is one set of options for a model."""
    fast = [(name, config) for name, config in configs.items() if isinstance(config, FastLoraConfig)]
    if not fast:
        return None
    first, options = fast[0][0], fast[0][1].options()
    for name, config in fast[1:]:
        if config.options() != options:
            warnings.warn(
                f"adapter {name!r} has other fast options than adapter {first!r}, which are used for the whole model: "
                f"{options.options_dict()}",
                stacklevel=4,
            )
    return options


def _check_strict(model: nn.Module, options: FastLoraOptions) -> None:
    """Raise if `strict` and an adapted Linear can never be fused; other kinds of layers may be stock."""
    for name, layer in lora_layers(model) if options.strict else ():
        if isinstance(layer, FastLoraLayer) or not isinstance(layer.get_base_layer(), nn.Linear):
            continue
        reason = why_not_installed(layer)
        if reason is not None:
            raise RuntimeError(f"strict=True: the fused path was not used because {reason} (layer {name})")


def _require_lora(model: nn.Module) -> None:
    if not lora_layers(model):
        raise ValueError(NOT_WRAPPED.format(type(model).__name__))


def _tuners(model: nn.Module, exact: type) -> list[nn.Module]:
    return [module for module in model.modules() if type(module) is exact]


def _replace_configs(model: nn.Module, convert: Callable[[Any], PeftConfig]) -> None:
    """Replace every LoRA configuration; the objects themselves may belong to other models, too."""
    mappings: list[Any] = [module.__dict__.get("peft_config") for module in model.modules()]
    for configs in {id(mapping): mapping for mapping in mappings if isinstance(mapping, dict)}.values():
        lora = {name: c for name, c in configs.items() if type(c) in (LoraConfig, FastLoraConfig)}
        configs.update({name: convert(config) for name, config in lora.items()})


def _as_fast(config: PeftConfig, options: FastLoraOptions) -> PeftConfig:
    fast = copy(config)
    fast.__class__ = FastLoraConfig
    fast.__dict__.update(options.options_dict())
    return fast


def _as_stock(config: PeftConfig) -> PeftConfig:
    stock = copy(config)
    stock.__class__ = LoraConfig
    for name in OPTION_NAMES:
        stock.__dict__.pop(name, None)
    return stock
