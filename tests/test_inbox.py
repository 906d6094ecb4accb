"""News wake the round trip when a client waits for them, and before its time when one has heard nothing yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from ifb_handler.engine.outputs import RequestOutput
from ifb_handler.torchserve.inbox import Inbox, Urgency

URGENCIES = {"one-shot": Urgency.NONE, "stream": Urgency.SOON, "new": Urgency.NOW}
FOREVER, LONG, SHORT = 60.0, 20.0, 0.05


@pytest.fixture
def inbox() -> Inbox:
    return Inbox(URGENCIES.__getitem__)


def token_of(request_id: str, finish_reason: str | None = None) -> RequestOutput:
    return RequestOutput(request_id, token_ids=[1], finish_reason=finish_reason)


def assert_wakes(inbox: Inbox, urgency: Urgency, news: Callable[[], None], expected: bool = True) -> None:
    """Whether a reader that waits for news of that urgency is woken by these; takes nothing."""
    awake = threading.Event()
    reader = threading.Thread(target=lambda: (inbox.wait(FOREVER, urgency), awake.set()))
    reader.start()
    news()
    assert awake.wait(LONG if expected else SHORT) == expected
    inbox.put([token_of("new")])
    reader.join()


@pytest.mark.parametrize(
    ("request_id", "finish_reason", "soon", "now"),
    [
        ("one-shot", None, False, False),
        ("one-shot", "length", True, False),
        ("stream", None, True, False),
        ("stream", "length", True, False),
        ("new", None, True, True),
    ],
)
def test_a_token_wakes_whom_its_client_needs(
    inbox: Inbox, request_id: str, finish_reason: str | None, soon: bool, now: bool
) -> None:
    output = token_of(request_id, finish_reason)
    assert_wakes(inbox, Urgency.SOON, lambda: inbox.put([output]), soon)
    inbox.take()
    assert_wakes(inbox, Urgency.NOW, lambda: inbox.put([output]), now)


def test_a_prompt_that_is_tokenized_and_a_nudge_wake_who_waits_for_any_news(inbox: Inbox) -> None:
    assert_wakes(inbox, Urgency.SOON, inbox.nudge)
    inbox.take()
    assert_wakes(inbox, Urgency.SOON, lambda: inbox.put_tokenized("stream", Future()))


def test_news_that_came_before_the_wait_end_it_until_they_are_taken(inbox: Inbox) -> None:
    inbox.put([token_of("one-shot"), token_of("new"), token_of("stream")])
    inbox.wait(FOREVER, Urgency.NOW)
    outputs, _ = inbox.take()
    assert [output.request_id for output in outputs] == ["one-shot", "new", "stream"]
    assert_wakes(inbox, Urgency.SOON, lambda: inbox.put([token_of("one-shot")]), False)
    assert len(inbox.take()[0]) == 2, "what wakes nobody is kept"
