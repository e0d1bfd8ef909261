"""`FastLoraConfig`: PEFT's `LoraConfig` plus the run-time options of the fused path."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass, field, fields
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from peft import LoraConfig, PeftType

SIDE_FILE = "fast_lora_config.json"

# Options whose capability is not built yet: anything but the default is refused rather than ignored.
NOT_YET_SUPPORTED = ("lora_compute_dtype",)

CHOICES = {"lora_compute_dtype": ("adapter", "base"), "recompute": ("activation", "projections")}


@dataclass(kw_only=True)
class FastLoraOptions:
    """What a user may choose about the fused path. No option changes a result beyond rounding."""

    fuse_mlp: bool = field(default=True, metadata={"help": "Run gated MLP blocks as one autograd node."})
    fuse_qkv: bool = field(
        default=True,
        metadata={"help": "Run projections that read one tensor (q/k/v and their like) as one autograd node."},
    )
    fuse_linear: bool = field(
        default=True, metadata={"help": "Run every other adapted Linear as a single-projection autograd node."}
    )
    lora_compute_dtype: str = field(
        default="adapter",
        metadata={
            "help": (
                "'adapter': each product in the dtype in which stock PEFT computes it. 'base': the LoRA branch in the "
                "dtype of the base layer, as autocast would."
            )
        },
    )
    recompute: str = field(
        default="activation",
        metadata={
            "help": (
                "What the backward of a gated MLP computes again. 'activation': keep x, gate and up. 'projections': "
                "keep x only and compute gate and up again."
            )
        },
    )
    chunk_size: int | None = field(
        default=None,
        metadata={
            "help": (
                "Rows (tokens) handled at a time inside a gated MLP block. Bounds its temporaries and changes no "
                "result beyond rounding. None: all rows at once."
            )
        },
    )
    strict: bool = field(
        default=False,
        metadata={
            "help": (
                "Raise, with the reason, where an adapted layer that a fuse_* switch covers cannot be fused. States "
                "that are meant to run stock (disabled, merged, adapter_names) never raise."
            )
        },
    )

    def check_options(self) -> None:
        """Raise ValueError, naming the field, the rule and the value, for the first option that is not valid."""
        for name in ("fuse_mlp", "fuse_qkv", "fuse_linear", "strict"):
            _check(isinstance(getattr(self, name), bool), name, "must be True or False", getattr(self, name))
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            _check(value in allowed, name, f"must be one of {', '.join(map(repr, allowed))}", value)
        size = self.chunk_size
        positive = isinstance(size, int) and not isinstance(size, bool) and size > 0
        _check(size is None or positive, "chunk_size", "must be None or a positive integer", size)
        defaults = {option.name: option.default for option in fields(FastLoraOptions)}
        for name in NOT_YET_SUPPORTED:
            value = getattr(self, name)
            _check(value == defaults[name], name, f"supports only {defaults[name]!r} in this version", value)

    def options(self) -> FastLoraOptions:
        """The options alone, without the LoRA fields."""
        return FastLoraOptions(**self.options_dict())

    def options_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OPTION_NAMES}


OPTION_NAMES = tuple(option.name for option in fields(FastLoraOptions))


@dataclass
class FastLoraConfig(LoraConfig, FastLoraOptions):
    """LoRA as in PEFT, trained through fused autograd nodes.

    Takes every argument of [`peft.LoraConfig`] and the options of [`FastLoraOptions`], all by keyword. The options are
    run-time choices: `adapter_config.json` holds stock LoRA fields only, so stock PEFT loads what is saved, and
    `save_pretrained` writes the options to `fast_lora_config.json` beside it.

    Raises:
        ValueError: an option is not valid; names the field, the rule and the value.
    """

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.check_options()

    def to_dict(self) -> dict[str, Any]:
        """The stock LoRA fields: the options are run-time choices, as PEFT's `runtime_config` is."""
        stock: dict[str, Any] = super().to_dict()  # type: ignore[no-untyped-call]
        return {key: value for key, value in stock.items() if key not in OPTION_NAMES}

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Write `adapter_config.json` (stock fields) and `fast_lora_config.json` (our options) to a directory."""
        super().save_pretrained(save_directory, **kwargs)
        with open(os.path.join(save_directory, SIDE_FILE), "w") as file:
            json.dump(self.options_dict(), file, indent=2, sort_keys=True)

    @classmethod
    def from_peft_type(cls, **kwargs: Any) -> FastLoraConfig:
        """Build the config from the fields of an `adapter_config.json`, ours or stock's.

        Unknown fields are dropped with PEFT's warning, since newer versions of PEFT add fields.

        Raises:
            ValueError: `peft_type` is not LORA.
            TypeError: unknown fields, and no `peft_type` that would say that this is an adapter configuration.
        """
        peft_type = kwargs.get("peft_type", PeftType.LORA)
        _check(peft_type == PeftType.LORA, "peft_type", f"must be 'LORA' for {cls.__name__}", peft_type)
        known = {f.name for f in fields(cls) if f.init}
        unknown = sorted(kwargs.keys() - known)
        if unknown:
            if "peft_type" not in kwargs:
                raise TypeError(
                    f"The {cls.__name__} config that is trying to be loaded is missing required keys: {{'peft_type'}}."
                )
            warnings.warn(
                f"Unexpected keyword arguments {unknown} for class {cls.__name__}, these are ignored. This probably "
                "means that the configuration was saved by a newer version of PEFT; consider upgrading it.",
                stacklevel=2,
            )
        return cls(**{key: value for key, value in kwargs.items() if key in known})

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any
    ) -> FastLoraConfig:
        """Read the configuration of any LoRA adapter, ours or stock's, from a directory or a hub repository.

        Options given by keyword (`strict=True`) win over those of the side file, which win over the defaults.

        Raises:
            ValueError: no adapter configuration there, it is not a LoRA adapter, or an option is not valid.
        """
        given = {name: kwargs.pop(name) for name in OPTION_NAMES if name in kwargs}
        config = super().from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        stored = _read_side_file(pretrained_model_name_or_path, subfolder, kwargs)
        for name, value in {**stored, **given}.items():
            setattr(config, name, value)
        config.check_options()
        return config  # type: ignore[no-any-return]


# PEFT's `from_pretrained` looks here which keywords are fields of the configuration.
FastLoraConfig.__annotations__ = dict(LoraConfig.__annotations__)


def _read_side_file(path: str, subfolder: str | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options beside an adapter configuration; empty for an adapter that stock PEFT saved."""
    folder = os.path.join(path, subfolder) if subfolder is not None else path
    file_name = os.path.join(folder, SIDE_FILE)
    if not os.path.isfile(file_name):
        if os.path.isdir(folder):
            return {}
        hub_kwargs = {key: kwargs[key] for key in ("revision", "cache_dir", "token") if key in kwargs}
        try:
            file_name = hf_hub_download(path, SIDE_FILE, subfolder=subfolder, **hub_kwargs)
        except (EntryNotFoundError, LocalEntryNotFoundError):
            return {}
    try:
        with open(file_name, encoding="utf-8") as file:
            stored = json.load(file)
    except ValueError as error:  # not JSON, or not text at all
        raise ValueError(f"{file_name} is not valid JSON ({error}); delete it to use the default options") from error
    if not isinstance(stored, dict):
        raise ValueError(f"{file_name} must hold a JSON object, got {type(stored).__name__}")
    unknown = sorted(stored.keys() - set(OPTION_NAMES))
    if unknown:
        warnings.warn(f"{file_name} holds options that this version does not know, ignored: {unknown}", stacklevel=3)
    return {key: value for key, value in stored.items() if key in OPTION_NAMES}


def _check(valid: bool, name: str, rule: str, value: Any) -> None:
    if not valid:
        raise ValueError(f"`{name}` {rule}, got {value!r}")
