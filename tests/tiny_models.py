"""Tiny random models with their tokenizers, made on the spot without a network, always alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCAB_SIZE = 300
MAX_MODEL_LEN = 2**16
"""So long that a request can be made to outlast any test: see `tests.engine.conftest.LASTING`."""
BOS, EOS = 256, 257
SLIDING_WINDOW = 24

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
    # Large weights make the distributions sharp, so that a wrong key or position shows.
    "initializer_range": 0.2,
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, then <bos>, <eos> and fillers up to the size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "<bos>", "<eos>", *(f"<filler{i}>" for i in range(VOCAB_SIZE - 258))]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", model_max_length=10**9
    )


def tiny_llama(path: Path | str) -> Path:
    """Save a Llama with grouped queries into the folder `path`, and return it."""
    config = LlamaConfig(num_hidden_layers=3, **COMMON)
    return save_model(LlamaForCausalLM, config, path)


def tiny_gemma3(path: Path | str) -> Path:
    """Save a Gemma 3 text model (windows of 24 tokens in two of three layers) into `path`."""
    config = Gemma3TextConfig(
        num_hidden_layers=3,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=16,
        **COMMON,
    )
    return save_model(Gemma3ForCausalLM, config, path)


def tiny_gemma2(path: Path | str) -> Path:
    """Save a Gemma 2 (windows, soft caps of scores and of logits) into `path`."""
    config = Gemma2Config(
        num_hidden_layers=2,
        sliding_window=SLIDING_WINDOW,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
        **COMMON,
    )
    return save_model(Gemma2ForCausalLM, config, path)


def tiny_qwen2(path: Path | str) -> Path:
    """Save a Qwen 2 (biases in q, k and v) into `path`."""
    settings = {k: v for k, v in COMMON.items() if k != "head_dim"} | {"hidden_size": 192}
    return save_model(Qwen2ForCausalLM, Qwen2Config(num_hidden_layers=2, **settings), path)


def tiny_mistral(path: Path | str) -> Path:
    """Save a Mistral (a window in every layer) into `path`."""
    config = MistralConfig(num_hidden_layers=2, sliding_window=SLIDING_WINDOW, **COMMON)
    return save_model(MistralForCausalLM, config, path)


def save_model(kind: Any, config: Any, path: Path | str, seed: int = 0) -> Path:
    """Save a random model of a class and config, with the tokenizer, into `path`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, 0.0 if "bias" in name else 1.0, 0.1)
    folder = Path(path)
    model.to(torch.float32).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
