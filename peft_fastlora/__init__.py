"""Faster, lighter LoRA fine-tuning with Hugging Face PEFT: `LoraConfig` becomes `FastLoraConfig`.

from peft import get_peft_model
from peft_fastlora import FastLoraConfig, fusion_report

model = get_peft_model(model, FastLoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
print(fusion_report(model))
"""

from .config import FastLoraConfig, FastLoraOptions
from .gated_mlp import FastLoraGatedMLP
from .layer import FastLoraLayer, FastLoraLinear
from .model import FastLoraModel, fuse, register, unfuse, unregister
from .report import FusionReport, fusion_report
from .shared_input import FastLoraSharedInput

__version__ = "0.1.0.dev0"

__all__ = [
    "FastLoraConfig",
    "FastLoraGatedMLP",
    "FastLoraLayer",
    "FastLoraLinear",
    "FastLoraModel",
    "FastLoraOptions",
    "FastLoraSharedInput",
    "FusionReport",
    "fuse",
    "fusion_report",
    "register",
    "unfuse",
    "unregister",
]

register()
