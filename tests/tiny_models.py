"""Tiny models of many transformers model types, made from configurations alone, each with a training loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCAB = 64

# What the configurations of decoders have in common.
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
# What those of encoders, and of encoders with decoders, have.
ENCODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SEQ2SEQ = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "use_cache": False,
}
PATCHES = {"image_size": 8, "patch_size": 4}
# Half of the layers with linear attention, half with full attention.
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
MLA = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
GEMMA3N = {
    "layer_types": ["full_attention", "full_attention"],
    "intermediate_size": [48, 48],
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 1,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.5, 0.0],
    "altup_num_inputs": 2,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {"vocab_size": VOCAB, "max_position_embeddings": 64}
SPEECH = {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}
FALCON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "new_decoder_architecture": True,
    "use_cache": False,
    **TOKENS,
}
GPT2 = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False, **TOKENS}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
    "use_cache": False,
}
CLIP = {
    "text_config": {**ENCODER, **TEXT, **TOKENS, "projection_dim": 16},
    "vision_config": {**ENCODER, **PATCHES, "projection_dim": 16},
    "projection_dim": 16,
}
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 8,
    "num_kv_shared_layers": 0,
}


def _ids(seed: int, length: int = 12) -> Tensor:
    return torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))


def _floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def _causal(model: nn.Module) -> Any:
    return model(input_ids=_ids(1), labels=_ids(1)).loss


def _masked(model: nn.Module) -> Any:
    return model(input_ids=_ids(1), labels=_ids(2)).loss


def _seq2seq(model: nn.Module) -> Any:
    return model(input_ids=_ids(1), labels=_ids(2, 7)).loss


def _speech(model: nn.Module) -> Any:
    return model(input_features=_floats(2, 8, 16), labels=_ids(2, 7)).loss


def _image(model: nn.Module) -> Any:
    return model(pixel_values=_floats(2, 3, 8, 8), labels=torch.tensor([0, 1])).loss


def _contrast(model: nn.Module) -> Any:
    return model(input_ids=_ids(1), pixel_values=_floats(2, 3, 8, 8), return_loss=True).loss


@dataclass(frozen=True)
class TinyModel:
    """A model type in a tiny size."""

    config: str  # name of the configuration class in transformers
    model: str  # name of the model class
    overrides: dict[str, Any]
    loss: Callable[[nn.Module], Tensor] = _causal

    @property
    def exists(self) -> bool:
        """Whether the transformers that is installed has this type."""
        return hasattr(transformers, self.config) and hasattr(transformers, self.model)

    def build(self) -> nn.Module:
        """The model with random weights, in float32 and training mode, without dropout; equal at every call."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.overrides)
        for name, value in vars(config).items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model.float().train()


def _decoder(name: str, config: str | None = None, **overrides: Any) -> TinyModel:
    return TinyModel(config or f"{name}Config", f"{name}ForCausalLM", {**DECODER, **overrides})


TINY_MODELS: dict[str, TinyModel] = {
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral"),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3"),
    "gemma2": _decoder("Gemma2", attn_implementation="eager"),
    "gemma3": _decoder("Gemma3", "Gemma3TextConfig", attn_implementation="eager"),
    "gemma3n": _decoder("Gemma3n", "Gemma3nTextConfig", **GEMMA3N),
    "gemma4": _decoder("Gemma4", "Gemma4TextConfig", **GEMMA4),
    "phi": _decoder("Phi"),
    "phi3": _decoder("Phi3"),
    "olmo2": _decoder("Olmo2"),
    "granite": _decoder("Granite"),
    "cohere2": _decoder("Cohere2"),
    "stablelm": _decoder("StableLm"),
    "nemotron": _decoder("Nemotron"),
    "mixtral": _decoder("Mixtral", num_local_experts=4),
    "deepseek_v3": _decoder("DeepseekV3", **MLA),
    "qwen3_next": _decoder("Qwen3Next", **LINEAR_ATTENTION, **MOE),
    "qwen3_5": _decoder("Qwen3_5", "Qwen3_5TextConfig", **LINEAR_ATTENTION),
    "falcon": TinyModel("FalconConfig", "FalconForCausalLM", FALCON),
    "gpt_neox": _decoder("GPTNeoX"),
    "gpt2": TinyModel("GPT2Config", "GPT2LMHeadModel", GPT2),
    "bert": TinyModel("BertConfig", "BertForMaskedLM", {**ENCODER, **TEXT}, _masked),
    "t5": TinyModel("T5Config", "T5ForConditionalGeneration", T5, _seq2seq),
    "bart": TinyModel("BartConfig", "BartForConditionalGeneration", {**SEQ2SEQ, **TEXT}, _seq2seq),
    "whisper": TinyModel("WhisperConfig", "WhisperForConditionalGeneration", {**SEQ2SEQ, **SPEECH}, _speech),
    "vit": TinyModel("ViTConfig", "ViTForImageClassification", {**ENCODER, **PATCHES}, _image),
    "clip": TinyModel("CLIPConfig", "CLIPModel", CLIP, _contrast),
}
