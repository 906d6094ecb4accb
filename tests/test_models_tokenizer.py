"""Tokenizers: from a folder, a GGUF file (converted once, then cached), a tokenizer.json."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_llama import write_tokenizer

from ifb_handler.models import tokenizer as tokenizer_module
from ifb_handler.models.errors import ModelError
from ifb_handler.models.source import ModelFiles, resolve
from ifb_handler.models.tokenizer import load_tokenizer

TEXTS = ["Hello world", " two  spaces\n\tand tabs", "naïve café, 日本語 🙂", "<|im_start|>user\nhi<|im_end|>\n", ""]
CHAT = [{"role": "user", "content": "What is gravity?"}]


def test_a_folders_tokenizer_is_the_one_that_was_saved_there(tmp_path: Path) -> None:
    saved = write_tokenizer(tmp_path)
    loaded = load_tokenizer(ModelFiles("tiny", tmp_path))
    for text in TEXTS:
        assert loaded.encode(text) == saved.encode(text)
    assert loaded.apply_chat_template(CHAT, tokenize=False) == saved.apply_chat_template(CHAT, tokenize=False)
    assert loaded.backend_tokenizer.decode(saved.encode("quick fox")) == "quick fox"


def test_a_gguf_files_tokenizer_equals_the_conversion_both_at_once_and_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    files = resolve("smollm2-135m")
    oracle = AutoTokenizer.from_pretrained(files.path.parent, gguf_file=files.path.name)
    monkeypatch.setenv("IFB_CACHE_DIR", str(tmp_path))
    first = load_tokenizer(files)
    with monkeypatch.context() as patched:
        patched.setattr(tokenizer_module, "staging_folder", None)  # a second conversion would fail
        second = load_tokenizer(files)
    for tokenizer in (first, second):
        for text in TEXTS:
            assert tokenizer.encode(text) == oracle.encode(text)
        expected = oracle.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == expected
        assert tokenizer.eos_token_id == oracle.eos_token_id


def test_a_changed_gguf_file_is_converted_anew(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"one")
    keys = {tokenizer_module._key(path)}
    path.write_bytes(b"other")
    keys.add(tokenizer_module._key(path))
    os.utime(path, ns=(1, 1))
    keys.add(tokenizer_module._key(path))
    assert len(keys) == 3


def test_another_tokenizer_takes_the_place_of_the_models_own(tmp_path: Path) -> None:
    saved = write_tokenizer(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "tokenizer.json", tmp_path / "alone.json")
    own = ModelFiles("none", tmp_path / "absent")
    for override in ("other", "other/tokenizer.json", "alone.json"):
        assert load_tokenizer(own, str(tmp_path / override)).encode("quick fox") == saved.encode("quick fox")
    beside_its_config = load_tokenizer(own, str(tmp_path / "other" / "tokenizer.json"))
    assert beside_its_config.eos_token == "</s>"
    assert beside_its_config.chat_template == saved.chat_template


def test_a_tokenizer_that_cannot_be_loaded_is_an_error_that_names_where_it_was_sought(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    (tmp_path / "empty").mkdir()
    for name in ("broken.json", "broken.gguf", "empty"):
        with pytest.raises(ModelError, match=f"tokenizer: none can be loaded from '.*{name}'"):
            load_tokenizer(ModelFiles("none", tmp_path), str(tmp_path / name))


def test_the_tokenizer_loads_without_the_models_of_transformers() -> None:
    code = (
        "import sys\n"
        "from ifb_handler.models.source import resolve\n"
        "from ifb_handler.models.tokenizer import load_tokenizer\n"
        "load_tokenizer(resolve('smollm2-135m'))\n"
        "print([m for m in ('transformers.modeling_utils', 'transformers.generation.utils') if m in sys.modules])"
    )
    load_tokenizer(resolve("smollm2-135m"))
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
