"""A Llama checkpoint of a few thousand random weights, with a tokenizer trained on a page of text, for quick tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant') %}{{ raise_exception('unknown role') }}{% endif %}"
    "[{{ message['role'] }}] {{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)

_CORPUS = (
    "In-flight batching decides at every iteration which sequences run. A request joins as soon as there is room.",
    "The quick brown fox jumps over the lazy dog; zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich.",
    "Once upon a time there was a paged cache, and every page went back to the pool when its request had ended.",
)


def write_tokenizer(folder: Path, *, chat_template: bool = True) -> Any:
    """A byte-level BPE tokenizer whose texts begin with <s>; saved in `folder` and returned."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    if chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_tiny_llama(folder: Path, *, max_model_len: int = 512, chat_template: bool = True, seed: int = 0) -> Path:
    """A folder as Hugging Face's `save_pretrained` writes it. -> `folder`"""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = write_tokenizer(folder, chat_template=chat_template)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_model_len,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
