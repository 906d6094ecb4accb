"""Hugging Face `generate`, one prompt at a time: what every greedy answer must equal."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    answer: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.answer)


def load_smollm2() -> Any:
    """The embedded model as transformers reads it from the same GGUF file, in float32."""
    from transformers import AutoModelForCausalLM

    from ifb_handler.models.source import resolve

    path = resolve("smollm2-135m").path
    return _endless(AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype="float32"))


def load_folder(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return _endless(AutoModelForCausalLM.from_pretrained(folder, dtype="float32"))


def _endless(model: Any) -> Any:
    """Without end-of-sequence ids: an answer has as many tokens as were asked for."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def generate_alone(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy answer to one prompt, of just `num_tokens` tokens."""
    import torch

    ids = torch.tensor([list(prompt)])
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens)
    return answer[0, len(prompt) :].tolist()


def make_cases(
    model: Any, count: int, shortest: int, longest: int, most_tokens: int, vocab_size: int, seed: int = 0
) -> list[Case]:
    """Random prompts whose lengths are spread evenly over the orders of magnitude, from the shortest to the longest."""
    source = random.Random(seed)
    cases = []
    for i in range(count):
        length = round(shortest * (longest / shortest) ** (i / (count - 1)))
        prompt = [source.randrange(3, vocab_size) for _ in range(length)]
        cases.append(Case(prompt, generate_alone(model, prompt, source.randint(3, most_tokens))))
    source.shuffle(cases)
    return cases
