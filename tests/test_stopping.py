"""Where an answer ends, and that a stream never shows what the whole answer does not hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from ifb_handler.engine.detokenizer import Detokenizer, Vocabulary
from ifb_handler.engine.errors import RequestError
from ifb_handler.engine.outputs import FinishReason
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.engine.stopping import Delta, OutputAssembler, StopStrings

EOS = (100, 101)


def _assembler(pieces: list[str], max_tokens: int = 16, **params: object) -> OutputAssembler:
    """An assembler with a vocabulary of `pieces`, from token 0 on, and the two EOS tokens."""
    tokenizer = Tokenizer(WordLevel({piece: i for i, piece in enumerate(pieces)} | {"<eos>": EOS[0], "<eot>": EOS[1]}))
    tokenizer.decoder = Fuse()
    return OutputAssembler(SamplingParams(**params), EOS, max_tokens, Detokenizer(Vocabulary(tokenizer)))


def _run(pieces: list[str], **params: object) -> tuple[list[str], Delta]:
    """The streamed texts of an answer made of `pieces`, and the delta that ended it."""
    assembler, texts = _assembler(pieces, **params), []
    for token_id in range(len(pieces)):
        delta = assembler.append(token_id)
        texts.append(delta.text)
        if delta.finish_reason is not None:
            break
    return texts, delta


def _one_shot(text: str, stops: list[str], include: bool, after: int = 0) -> tuple[str, str | None]:
    """The definition: cut at the match that completes first beyond `after` characters, the longest of several."""
    for end in range(after + 1, len(text) + 1):
        matches = [stop for stop in stops if end >= len(stop) and text[end - len(stop) : end] == stop]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.text("ab\u4f60", max_size=4), max_size=12),
    stops=st.lists(st.text("ab\u4f60", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_streaming_in_any_pieces_gives_the_one_shot_answer(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int
) -> None:
    text, early = "".join(pieces), len("".join(pieces[:min_tokens]))
    expected, expected_stop = _one_shot(text, stops, include, early)
    strings, shown, stop = StopStrings(stops, include), "", None
    for number, piece in enumerate(pieces, 1):
        new, stop = strings.push(piece, may_stop=number > min_tokens)
        shown += new
        assert expected.startswith(shown)
        if stop is not None:
            break
    else:
        shown += strings.flush()
    assert (shown, stop) == (expected, expected_stop)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab", max_size=3), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_no_more_text_is_held_than_could_begin_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    strings, shown, text = StopStrings(stops), "", ""
    for piece in pieces:
        text += piece
        new, _ = strings.push(piece, may_stop=False)
        shown += new
        held = text[len(shown) :]
        longest = max((i for s in stops for i in range(len(s)) if text.endswith(s[:i])), default=0)
        assert len(held) == longest


def test_a_stop_string_over_several_tokens_never_leaks_its_beginning() -> None:
    texts, last = _run(["one", "\n", "Us", "er", ": two"], stop=["\nUser:"])
    assert texts == ["one", "", "", "", ""]
    assert last == Delta("", FinishReason.STOP, "\nUser:")


def test_held_text_is_released_once_it_turns_out_not_to_be_a_stop_string() -> None:
    assert _run(["one", "\n", "Us", "age"], stop=["\nUser:"])[0] == ["one", "", "", "\nUsage"]


def test_a_stop_string_that_ends_inside_a_token_cuts_the_token() -> None:
    assert _run(["a. b", "c. d"], stop=["c."]) == (["a. b", ""], Delta("", FinishReason.STOP, "c."))
    texts, _ = _run(["a. b", "c. d"], stop=["c."], include_stop_str_in_output=True)
    assert texts == ["a. b", "c."]


def test_the_stop_string_that_completes_first_wins_and_then_the_longest() -> None:
    assert _run(["xabcd"], stop=["abcd", "bc"])[1] == Delta("xa", FinishReason.STOP, "bc")
    assert _run(["xa", "b", "cd"], stop=["abcd", "bc"])[1].stop_reason == "bc"
    assert _run(["xabc"], stop=["c", "abc", "bc"])[1] == Delta("x", FinishReason.STOP, "abc")


def test_text_of_the_first_min_tokens_tokens_can_not_stop_an_answer() -> None:
    texts, last = _run(["END", " a ", "EN", "D b", " END"], stop="END", min_tokens=2)
    assert "".join(texts) == "END a "
    assert last.stop_reason == "END"


def test_a_stop_string_may_begin_in_the_first_min_tokens_tokens_and_end_after() -> None:
    assert _run(["a", "EN", "D b"], stop="END", min_tokens=2)[1] == Delta("", FinishReason.STOP, "END")
    assert _run(["a", "EN", "D b", "c"], stop="END", min_tokens=3)[0] == ["a", "", "END b", "c"]


def test_held_text_comes_out_when_the_answer_ends_by_length() -> None:
    texts, last = _run(["a", "E", "N"], max_tokens=3, stop="END")
    assert texts == ["a", "", "EN"]
    assert last == Delta("EN", FinishReason.LENGTH)


@pytest.mark.parametrize("eos", EOS)
def test_every_eos_id_ends_the_answer_and_releases_held_text(eos: int) -> None:
    assembler = _assembler(["a", "E"], stop="END")
    assert [assembler.append(i).text for i in (0, 1)] == ["a", ""]
    assert assembler.append(eos) == Delta("E", FinishReason.STOP)
    assert assembler.num_generated == 3


def test_a_stop_token_ends_the_answer_and_its_text_is_left_out() -> None:
    assembler = _assembler(["a", "b"], stop_token_ids=[1], include_stop_str_in_output=True)
    assert assembler.append(0) == Delta("a")
    assert assembler.append(1) == Delta("", FinishReason.STOP, 1)


def test_ignore_eos_reads_eos_as_text_but_stop_token_ids_still_stop() -> None:
    assert _assembler(["a"], ignore_eos=True).append(100) == Delta("<eos>")
    assert _assembler(["a"], ignore_eos=True, stop_token_ids=[101]).append(101) == Delta("", FinishReason.STOP, 101)


def test_a_stop_token_is_honoured_from_the_min_tokens_th_token_on() -> None:
    assembler = _assembler(["a", "b"], stop_token_ids=[1], min_tokens=2)
    assert assembler.append(1) == Delta("b")
    assert assembler.append(1) == Delta("", FinishReason.STOP, 1)


def test_a_stop_outranks_length_at_the_last_token() -> None:
    assert _run(["a", "END"], max_tokens=2, stop="END")[1] == Delta("", FinishReason.STOP, "END")
    assembler = _assembler(["a"], max_tokens=1)
    assert assembler.append(100) == Delta("", FinishReason.STOP)


def test_without_a_tokenizer_tokens_are_counted_and_stop_strings_refused() -> None:
    assembler = OutputAssembler(SamplingParams(stop_token_ids=[9]), EOS, 3, Detokenizer(Vocabulary(None), [1, 2]))
    assert [assembler.append(5) for _ in range(3)] == [Delta(""), Delta(""), Delta("", FinishReason.LENGTH)]
    with pytest.raises(RequestError, match="stop_token_ids") as error:
        OutputAssembler(SamplingParams(stop="x"), EOS, 3, Detokenizer(Vocabulary(None)))
    assert error.value.param == "stop"
