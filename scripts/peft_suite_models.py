"""Tiny models with random weights, laid out as a Hugging Face hub cache under the names that PEFT's tests load.

PEFT's tests ask the hub for models such as `trl-internal-testing/tiny-random-LlamaForCausalLM`. With `HF_HUB_CACHE`
set to the folder made here and the hub switched off, they get these instead, and nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

# Every gated MLP and every q/k/v projection of these is adapted: the models that `test_decoder_models.py` runs on.
DECODERS = (
    "trl-internal-testing/tiny-random-LlamaForCausalLM",
    "peft-internal-testing/tiny-dummy-qwen2",
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM",
    "hf-internal-testing/tiny-random-MistralForCausalLM",
)

# More tokens than the largest token id in PEFT's tests, 1000 (an aLoRA invocation token), needs.
VOCABULARY = 1024

# Special tokens lie behind the 256 bytes that the tokenizer knows, and not among the small ids that tests take for
# text: the embedding of padding is zero, and a model is silent after it.
SPECIAL_TOKENS = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 256, "pad_token_id": 257, "eos_token_id": 258}

# With weights of the usual 0.02, the adapters of so small a model would change its output by less than the tolerances
# of the tests that look for a change.
SPREAD = 0.1

TRANSFORMER = {**TOKENS, "num_attention_heads": 4, "max_position_embeddings": 512}

# Every projection has both sides larger than 20, the largest rank that `test_decoder_models.py` makes by combination.
LLAMA = {
    **TRANSFORMER,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "initializer_range": SPREAD,
}
GEMMA3 = {**LLAMA, "head_dim": 16}
LLAMA4 = {
    **LLAMA,
    "hidden_size": 16,
    "head_dim": 4,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "moe_layers": [0, 1],
}
GPT_OSS = {
    **LLAMA,
    "head_dim": 16,
    "num_local_experts": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 131072,  # its rotary embeddings are scaled for this length
}
OPT = {
    **TRANSFORMER,
    "hidden_size": 16,
    "num_hidden_layers": 5,
    "word_embed_proj_dim": 16,
    "ffn_dim": 32,
    "init_std": SPREAD,
}
OPT_125M = {**OPT, "num_hidden_layers": 12}
BERT = {**TRANSFORMER, "hidden_size": 64, "num_hidden_layers": 5, "intermediate_size": 96, "initializer_range": SPREAD}
GPT2 = {**TOKENS, "n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 512, "initializer_range": SPREAD}
BLOOM = {**TOKENS, "hidden_size": 32, "n_layer": 5, "n_head": 4, "initializer_range": SPREAD}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_ff": 37, "d_kv": 8, "num_layers": 5, "num_heads": 4}
BART = {
    **TOKENS,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "init_std": SPREAD,
}

# transformers model class, fields of its configuration, names on the hub; PEFT moved some of them between releases
MODELS: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    (
        "LlamaForCausalLM",
        LLAMA,
        (
            "trl-internal-testing/tiny-random-LlamaForCausalLM",
            "peft-internal-testing/tiny-random-LlamaForCausalLM",
            "hf-internal-testing/tiny-random-LlamaForCausalLM",
            "HuggingFaceH4/tiny-random-LlamaForCausalLM",
        ),
    ),
    ("LlamaForSequenceClassification", LLAMA, ("trl-internal-testing/tiny-LlamaForSequenceClassification-3.2",)),
    ("Qwen2ForCausalLM", LLAMA, ("peft-internal-testing/tiny-dummy-qwen2",)),
    ("Gemma3ForCausalLM", GEMMA3, ("hf-internal-testing/tiny-random-Gemma3ForCausalLM",)),
    ("MistralForCausalLM", LLAMA, ("hf-internal-testing/tiny-random-MistralForCausalLM",)),
    ("Llama4ForCausalLM", LLAMA4, ("trl-internal-testing/tiny-Llama4ForCausalLM",)),
    ("GptOssForCausalLM", GPT_OSS, ("trl-internal-testing/tiny-GptOssForCausalLM",)),
    (
        "OPTForCausalLM",
        OPT,
        ("peft-internal-testing/tiny-random-OPTForCausalLM", "hf-internal-testing/tiny-random-OPTForCausalLM"),
    ),
    ("OPTForCausalLM", OPT_125M, ("peft-internal-testing/opt-125m", "facebook/opt-125m")),
    (
        "GPT2LMHeadModel",
        GPT2,
        ("peft-internal-testing/tiny-random-gpt2", "hf-internal-testing/tiny-random-gpt2", "openai-community/gpt2"),
    ),
    (
        "BloomForCausalLM",
        BLOOM,
        ("peft-internal-testing/tiny-random-BloomForCausalLM", "hf-internal-testing/tiny-random-BloomForCausalLM"),
    ),
    (
        "BertModel",
        BERT,
        ("peft-internal-testing/tiny-random-BertModel", "hf-internal-testing/tiny-random-BertModel"),
    ),
    ("BertForSequenceClassification", BERT, ("peft-internal-testing/tiny-random-BertForSequenceClassification",)),
    (
        "RobertaForSequenceClassification",
        BERT,
        ("peft-internal-testing/tiny-random-RobertaForSequenceClassification",),
    ),
    (
        "T5ForConditionalGeneration",
        T5,
        ("peft-internal-testing/tiny-random-t5", "hf-internal-testing/tiny-random-t5", "google/flan-t5-small"),
    ),
    (
        "BartForConditionalGeneration",
        BART,
        (
            "peft-internal-testing/tiny-random-BartForConditionalGeneration",
            "hf-internal-testing/tiny-random-BartForConditionalGeneration",
        ),
    ),
)

REVISION = "0" * 40  # the hub's cache names its folders by commit


def ensure_hub(cache: Path) -> Path:
    """Make the hub cache folder under `cache` unless it is there already."""
    import transformers

    digest = hashlib.sha256(json.dumps(MODELS, sort_keys=True).encode()).hexdigest()[:8]
    hub = cache / f"hub-transformers-{transformers.__version__}-{digest}"
    if hub.is_dir():
        return hub
    unfinished = hub.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for model_class, fields, names in MODELS:
        if hasattr(transformers, model_class):  # older releases lack some
            for name in names:
                _save_model(unfinished / f"models--{name.replace('/', '--')}", model_class, fields)
    return unfinished.rename(hub)


def _save_model(repository: Path, model_class: str, fields: dict[str, Any]) -> None:
    """Save a model with random weights, the same ones each time, and a tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, model_class)
    snapshot = repository / "snapshots" / REVISION
    cls(cls.config_class(**fields)).save_pretrained(snapshot)
    _tokenizer().save_pretrained(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)


def _tokenizer() -> Any:
    """A tokenizer that knows single bytes and the special tokens of the configurations above."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL_TOKENS.values()]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS)
