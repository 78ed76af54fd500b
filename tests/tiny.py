"""Tiny random models and a byte-level tokenizer, so that every architecture is tested in milliseconds."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WINDOW = 24

_SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "mistral": {"model_type": "mistral", "sliding_window": WINDOW},
    "phi3": {"model_type": "phi3", "sliding_window": WINDOW, "original_max_position_embeddings": 4096},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
}


def tiny_config(name: str, **changes: Any) -> Any:
    """The configuration of a tiny model of one architecture."""
    settings = _SHAPE | ARCHITECTURES[name] | changes
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def build(config: Any, attention: str = "sdpa", seed: int = 0) -> Any:
    """A random model, in evaluation mode."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval()


@cache
def tiny_model(name: str, attention: str = "sdpa") -> Any:
    """A random model of one architecture, the same one every time."""
    return build(tiny_config(name), attention)


def tiny_tokenizer(chat_template: str | None = CHATML) -> Any:
    """One id a byte, after three control tokens."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
