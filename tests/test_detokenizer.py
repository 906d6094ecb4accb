"""Text made one token at a time against the tokenizers' own decode of all of them."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ifb_handler.engine.detokenizer import Detokenizer, Vocabulary
from ifb_handler.models.source import resolve
from ifb_handler.models.tokenizer import load_tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog. Isn't it so? 1 + 1 = 2, he said.",
    "  two spaces,\ta tab\nand a line\r\n",
    "Zażółć gęślą jaźń; naïve café; Größe",
    "你好，世界。東京都に住んでいます。안녕하세요",  # noqa: RUF001
    "family 👩‍👩‍👧‍👦, flag 🇵🇱, thumbs 👍🏽, heart ❤️ end",
    "a real replacement character: \ufffd and \ufffd\ufffd.",
    "שלום עולם مرحبا بالعالم हिन्दी",
]
SPECIAL = ["<s>", "</s>"]


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool ✓>", normalized=False)])
    return tokenizer


def _llama() -> Tokenizer:
    """The parts of Llama 2's tokenizer: SentencePiece BPE with byte fallback; decode drops the first space."""
    pieces = ["<unk>", *SPECIAL, *[f"<0x{byte:02X}>" for byte in range(256)]]
    pieces += ["▁", *sorted(set("".join(TEXTS[:3])) - {" ", "\n", "\t", "\r"}), "▁t", "▁th", "▁the", "in", "\ufffd"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("i", "n")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _smollm2() -> PreTrainedTokenizerFast:
    return load_tokenizer(resolve("smollm2-135m"))


BUILDERS = {
    "smollm2": _smollm2,
    "byte_level": _byte_level,
    "llama": _llama,
    "unigram": _unigram,
    "word_piece": _word_piece,
}


@cache
def _tokenizer(kind: str) -> tuple[Tokenizer, Vocabulary]:
    tokenizer = BUILDERS[kind]()
    return getattr(tokenizer, "backend_tokenizer", tokenizer), Vocabulary(tokenizer)


def _stream(vocabulary: Vocabulary, ids: list[int], skip: bool = True, prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(vocabulary, prompt or [], skip)
    return [detokenizer.push(token_id) for token_id in ids]


def _agree(streamed: str, whole: str) -> bool:
    """The same, but for half a character at the end, which decode shows as U+FFFD (byte fallback: up to three)."""
    return whole.startswith(streamed) and set(whole[len(streamed) :]) <= {"\ufffd"} and len(whole) - len(streamed) <= 3


def _ids(tokenizer: Tokenizer, data: st.DataObject) -> list[int]:
    """Encoded texts and random ids (special, added and unknown ones among them), cut anywhere and strung together."""
    size = tokenizer.get_vocab_size()
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    part = st.sampled_from(encoded).flatmap(
        lambda ids: st.tuples(st.integers(0, len(ids)), st.integers(0, 12)).map(lambda c: ids[c[0] : c[0] + c[1]])
    )
    noise = st.lists(st.integers(0, size + 2), max_size=3)
    return [i for piece in data.draw(st.lists(part | noise, max_size=8)) for i in piece]


@pytest.mark.parametrize("kind", ["smollm2", "byte_level", "unigram", "word_piece"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_joined_equal_the_whole_decode(kind: str, data: st.DataObject) -> None:
    tokenizer, vocabulary = _tokenizer(kind)
    ids, skip = _ids(tokenizer, data), data.draw(st.booleans())
    assert _agree("".join(_stream(vocabulary, ids, skip)), tokenizer.decode(ids, skip_special_tokens=skip))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_with_byte_fallback_too_unless_the_bytes_are_malformed(data: st.DataObject) -> None:
    tokenizer, vocabulary = _tokenizer("llama")
    ids, skip = _ids(tokenizer, data), data.draw(st.booleans())
    streamed, whole = "".join(_stream(vocabulary, ids, skip)), tokenizer.decode(ids, skip_special_tokens=skip)
    # In a malformed run decode takes back its whole characters too, which a stream can not.
    assert _agree(streamed, whole) or "\ufffd" in whole
    assert len(streamed) <= len(whole)


def test_a_space_that_begins_a_text_is_dropped_as_a_byte_too_and_only_once() -> None:
    tokenizer, vocabulary = _tokenizer("llama")
    space, unknown = tokenizer.token_to_id("<0x20>"), tokenizer.get_vocab_size() + 1
    (word, *_) = tokenizer.encode("the fox", add_special_tokens=False).ids
    for ids in ([space], [space, space], [space, word], [unknown, space, word], [word, space], [space] * 12):
        assert "".join(_stream(vocabulary, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", BUILDERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_after_a_prompt_the_text_is_what_decode_of_both_adds(kind: str, data: st.DataObject) -> None:
    tokenizer, vocabulary = _tokenizer(kind)
    prompt, ids = _ids(tokenizer, data), _ids(tokenizer, data)
    skip = data.draw(st.booleans())
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    both = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    streamed = "".join(_stream(vocabulary, ids, skip, prompt))
    if "\ufffd" not in before + both:
        assert both == before + streamed
    elif kind != "llama" and not before.endswith("\ufffd"):
        assert _agree(before + streamed, both)


@pytest.mark.parametrize("kind", ["smollm2", "byte_level", "llama"])
@pytest.mark.parametrize("text", TEXTS)
def test_half_a_character_is_never_shown(kind: str, text: str) -> None:
    tokenizer, vocabulary = _tokenizer(kind)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    shown = ""
    for piece in _stream(vocabulary, ids):
        shown += piece
        assert text.startswith(shown) or text.replace(" ", "", 1).startswith(shown)
    assert shown == tokenizer.decode(ids)


def test_half_a_character_at_the_end_of_the_prompt_is_completed_by_the_answer() -> None:
    for kind in ("smollm2", "byte_level", "llama"):
        tokenizer, vocabulary = _tokenizer(kind)
        ids = tokenizer.encode("x👩", add_special_tokens=False).ids
        halves = [cut for cut in range(len(ids)) if tokenizer.decode(ids[:cut]).endswith("\ufffd")]
        assert halves
        for cut in halves:
            assert "".join(_stream(vocabulary, ids[cut:], prompt=ids[:cut])) == "👩"


def test_a_malformed_byte_becomes_a_replacement_character_as_soon_as_it_is_known() -> None:
    tokenizer, vocabulary = _tokenizer("llama")
    ids = [tokenizer.token_to_id(piece) for piece in ("<0xE4>", "<0xBD>", "a", "<0xFF>", "\ufffd")]
    assert _stream(vocabulary, ids) == ["", "", "\ufffd\ufffda", "\ufffd", "\ufffd"]
    assert tokenizer.decode(ids) == "\ufffd\ufffda\ufffd\ufffd"


def test_the_space_between_prompt_and_answer_is_kept_for_sentencepiece() -> None:
    tokenizer, vocabulary = _tokenizer("llama")
    the = tokenizer.token_to_id("▁the")
    start = tokenizer.token_to_id("<s>")
    prompt = [start, *tokenizer.encode("in", add_special_tokens=False).ids]
    assert _stream(vocabulary, [the, the], prompt=prompt) == [" the", " the"]
    assert _stream(vocabulary, [the, the], prompt=[start] * 20) == ["the", " the"]
    assert _stream(vocabulary, [the], prompt=[*prompt, *[start] * 20]) == [" the"]


def test_a_special_token_amid_the_answer_is_skipped_or_shown_as_asked() -> None:
    tokenizer, vocabulary = _tokenizer("byte_level")
    ids = [*tokenizer.encode("one").ids, tokenizer.token_to_id("</s>"), tokenizer.token_to_id("<tool ✓>")]
    assert "".join(_stream(vocabulary, ids)) == "one<tool ✓>"
    assert "".join(_stream(vocabulary, ids, skip=False)) == "one</s><tool ✓>"


def test_the_context_of_a_token_does_not_grow_with_the_answer() -> None:
    class Measured(Vocabulary):
        longest = 0

        def decode(self, token_ids: list[int]) -> str:
            self.longest = max(self.longest, len(token_ids))
            return super().decode(token_ids)

    for kind in BUILDERS:
        tokenizer, _ = _tokenizer(kind)
        vocabulary = Measured(tokenizer)
        ids = [i for text in TEXTS for i in tokenizer.encode(text).ids] * 20
        _stream(vocabulary, ids, prompt=ids)
        assert vocabulary.longest <= 9


def test_no_tokenizer_gives_no_text_and_no_failure() -> None:
    detokenizer = Detokenizer(Vocabulary(None), [1, 2, 3])
    assert not detokenizer.makes_text
    assert [detokenizer.push(i) for i in (5, 6, 10**9)] == ["", "", ""]
