"""How one request wants its tokens chosen and when it wants to stop. Names, meanings and ranges are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ifb_handler.engine.errors import RequestError
from ifb_handler.engine.structured import StructuredOutput

MAX_SEED = 2**64 - 1
GREEDY_BELOW = 1e-5
MAX_LOGPROBS = 20
"""Most of the likeliest tokens that `logprobs` and `prompt_logprobs` can ask for at each position: OpenAI's limit."""

# Repeats are not counted. They keep what a field costs the engine within milliseconds.
MAX_BAD_WORD_SEQUENCES = 512
"""Most token id sequences that `bad_words` may stand for; a text is two: as it is, and with a space before it."""
MAX_BAD_WORD_LENGTH = 256
"""Most characters, or token ids, of one of the `bad_words`."""
MAX_BAD_WORDS_LENGTH = 4096
"""Most characters of all texts in `bad_words` together."""
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 18
"""About the largest vocabulary there is; the engine refuses what is not in its own."""


@dataclass(frozen=True)
class SamplingParams:
    """Validated on construction: a bad value raises RequestError naming the field, the value and the range.

    n                          answers to one prompt, >= 1
    best_of                    answers to generate, >= n: the n with the highest sum of their tokens' log probabilities
                               are given, best first, once all have ended; None: n
    use_beam_search            best_of is the number of beams, and the n best answers are given, best first, at the end.
                               Nothing is sampled: temperature, top_k, top_p and min_p are left alone; nor can it be
                               asked for logprobs, stop (stop_token_ids are honoured) or structured
    length_penalty             of a beam search: an answer's score is the sum of its tokens' log probabilities over
                               length ** length_penalty, -10 to 10
    early_stopping             of a beam search, when to end it once best_of answers are found: True: at once; False:
                               when the best beam, ended now, would be no better than the worst of them; "never": when
                               it could be no better at any length
    max_tokens                 most tokens to generate, >= 1; None means up to the model's length
    min_tokens                 no stop of any kind before this many tokens, >= 0
    temperature                0 to 2; 0 is greedy, and so is anything below 1e-5
    top_k                      keep the k most likely tokens; 0 or -1 keeps all
    top_p                      keep the smallest set of tokens whose probabilities reach it, (0, 1]
    min_p                      drop tokens less likely than min_p times the likeliest, [0, 1]
    presence_penalty           taken off the logit of every token generated before, -2 to 2
    frequency_penalty          taken off the logit of a token once each time it was generated before, -2 to 2
    repetition_penalty         > 0: what the logits of all tokens in prompt and answer so far are divided by (a negative
                               one is multiplied)
    logit_bias                 token id (or the same as text, as JSON has it) to what is added to its logit, -100 to
                               100; at most MAX_LOGIT_BIASES
    allowed_token_ids          only these may be generated; not empty, at most MAX_ALLOWED_TOKEN_IDS; None: all
    bad_words                  texts that are not generated, nor with a space before them; or token id sequences. At
                               most 256 texts or 512 sequences, each of at most MAX_BAD_WORD_LENGTH characters or ids;
                               the texts of at most MAX_BAD_WORDS_LENGTH together
    logprobs                   give the log probability of each chosen token and of so many of the likeliest, 0 to
                               MAX_LOGPROBS; None: give none
    prompt_logprobs            the same for the prompt's tokens
    seed                       0 to 2**64 - 1; the same seed gives the same tokens whoever the neighbours are
    stop                       text that ends the answer, not part of it unless include_stop_str_in_output
    stop_token_ids             token ids that end the answer beside the model's own end-of-sequence ids; at most
                               MAX_STOP_TOKEN_IDS
    ignore_eos                 do not stop at the model's end-of-sequence ids
    structured                 the form that the answer is held to. It ends when that is fulfilled: if nothing can
                               follow, or at an end-of-sequence id, which can come nowhere else; before min_tokens
                               only if there is no other way on, and whatever ignore_eos says
    skip_special_tokens        leave special tokens out of the text
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    structured: StructuredOutput | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def num_sequences(self) -> int:
        """How many sequences the engine runs, each for an answer of its own; a beam search is one."""
        return 1 if self.use_beam_search else self.width

    @property
    def width(self) -> int:
        """How many answers the `n` that are given are chosen from; how many beams a beam search has."""
        return self.n if self.best_of is None else self.best_of

    @property
    def ranked(self) -> bool:
        """Whether the sequences' answers are ranked when all have ended: such a request can not be streamed."""
        return self.num_sequences > self.n

    @property
    def penalised(self) -> bool:
        """Whether tokens that were there before count against themselves."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return penalties != (0, 0, 1)

    @property
    def depends_on_answer(self) -> bool:
        """Whether what is changed in the logits of a token depends on the answer's tokens before it."""
        return self.penalised or bool(self.bad_words) or self.structured is not None

    @property
    def token_ids(self) -> dict[str, list[int]]:
        """By field, the token ids that must lie in the model's vocabulary."""
        return {
            "stop_token_ids": list(self.stop_token_ids or ()),
            "logit_bias": list(self.logit_bias or ()),
            "allowed_token_ids": list(self.allowed_token_ids or ()),
            "bad_words": [i for word in self.bad_words or () if not isinstance(word, str) for i in word],
        }

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, None)
        if self.best_of is not None:
            _integer("best_of", self.best_of, 1, None)
            if self.best_of < self.n:
                raise RequestError(f"best_of: {self.best_of} is below n, {self.n}", "best_of")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        _integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens: {self.min_tokens} is above max_tokens, {self.max_tokens}", "min_tokens")
        _real("temperature", self.temperature, 0.0, 2.0)
        _integer("top_k", self.top_k, -1, None)
        _real("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, math.inf, low_open=True, high_open=True)
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                _integer(field, getattr(self, field), 0, MAX_LOGPROBS)
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            object.__setattr__(self, "allowed_token_ids", allowed)
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids: [] leaves no token to generate", "allowed_token_ids")
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        flags = ("use_beam_search", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
        for field in flags:
            if not isinstance(getattr(self, field), bool):
                raise RequestError(f"{field}: {getattr(self, field)!r} is not true or false", field)
        if not isinstance(self.structured, StructuredOutput | None):
            raise RequestError(f"structured: {self.structured!r} is not a StructuredOutput", "structured")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        stops = () if self.stop_token_ids is None else self.stop_token_ids
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", stops, MAX_STOP_TOKEN_IDS))
        _check_beam_search(self)


def _check_beam_search(params: SamplingParams) -> None:
    _real("length_penalty", params.length_penalty, -10.0, 10.0)
    if not (isinstance(params.early_stopping, bool) or params.early_stopping == "never"):
        raise RequestError(
            f'early_stopping: {_shown(params.early_stopping)} is not true, false or "never"', "early_stopping"
        )
    if not params.use_beam_search:
        for field, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(params, field) != neutral:
                raise RequestError(f"{field}: is given only with use_beam_search", field)
        return
    # As they are when they change nothing, or were left out.
    left_alone = {"temperature": (0.0, 1.0), "top_k": (0, -1), "top_p": (1.0,), "min_p": (0.0,)}
    for field, neutral in left_alone.items():
        value = getattr(params, field)
        if value not in neutral:
            raise RequestError(f"{field}: {value} means nothing to a beam search, which draws no tokens", field)
    for field in ("logprobs", "stop"):
        if getattr(params, field) not in (None, ()):
            raise RequestError(f"{field}: is not given with use_beam_search", field)
    if params.structured is not None:
        raise RequestError(f"{params.structured.field}: is not given with use_beam_search", params.structured.field)
    object.__setattr__(params, "temperature", 0.0)


def _integer(field: str, value: object, low: int, high: int | None) -> None:
    allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise RequestError(f"{field}: {value!r} is not {allowed}", field)


def _real(field: str, value: object, low: float, high: float, low_open: bool = False, high_open: bool = False) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if good:
        good = (low < value if low_open else low <= value) and (value < high if high_open else value <= high)
    if not good:
        interval = f"{'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
        raise RequestError(f"{field}: {value!r} is not a number in {interval}", field)


def _stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) and s for s in strings):
        raise RequestError(f"stop: {_shown(stop)} is not a non-empty string or a list of them", "stop")
    for text in strings:
        check_text("stop", text)
    return tuple(strings)


def check_text(field: str, text: str) -> None:
    """Raises RequestError for a lone surrogate: no token stands for one, and tokenizers fail at it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{field}: {_shown(text)} has a lone surrogate at {error.start}, which is not text", field
        ) from error


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _token_ids(field: str, ids: object, most: int) -> tuple[int, ...]:
    if not _are_token_ids(ids):
        raise RequestError(f"{field}: {_shown(ids)} is not a list of token ids", field)
    different = tuple(dict.fromkeys(ids))  # type: ignore[call-overload]
    _at_most(field, len(different), most, "token ids")
    return different


def _at_most(field: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise RequestError(f"{field}: {count} {what} are more than {most}", field)


def _are_token_ids(ids: object) -> bool:
    return isinstance(ids, (list, tuple)) and set(map(type, ids)) <= {int} and min(ids, default=0) >= 0


def _logit_bias(biases: object) -> dict[int, float] | None:
    if biases is None:
        return None
    if not isinstance(biases, Mapping):
        raise RequestError(f"logit_bias: {_shown(biases)} is not a map of token ids to numbers", "logit_bias")
    _at_most("logit_bias", len(biases), MAX_LOGIT_BIASES, "token ids")
    by_id: dict[int, float] = {}
    for key, bias in biases.items():
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key
        if type(token_id) is not int or token_id < 0:
            raise RequestError(f"logit_bias: {_shown(key)} is not a token id", "logit_bias")
        if not isinstance(bias, (int, float)) or isinstance(bias, bool) or not -100 <= bias <= 100:
            raise RequestError(f"logit_bias: {_shown(bias)}, for token {token_id}, is not in [-100, 100]", "logit_bias")
        by_id[token_id] = float(bias)
    return by_id


def _bad_words(words: object) -> tuple[str | tuple[int, ...], ...]:
    if words is None:
        return ()
    if not isinstance(words, (list, tuple)) or not all(
        word and (isinstance(word, str) or _are_token_ids(word)) for word in words
    ):
        raise RequestError(
            f"bad_words: {_shown(words)} is not a list of non-empty texts or token id lists", "bad_words"
        )
    different = tuple(dict.fromkeys(word if isinstance(word, str) else tuple(word) for word in words))
    texts = [word for word in different if isinstance(word, str)]
    what = "token id sequences (a text is two)"
    _at_most("bad_words", len(different) + len(texts), MAX_BAD_WORD_SEQUENCES, what)
    for word in different:
        what = "characters of a word" if isinstance(word, str) else "token ids of a word"
        _at_most("bad_words", len(word), MAX_BAD_WORD_LENGTH, what)
    _at_most("bad_words", sum(map(len, texts)), MAX_BAD_WORDS_LENGTH, "characters in all")
    for text in texts:
        check_text("bad_words", text)
    return different
