"""Clients that have all hung up are found out when TorchServe stops calling, and at no other time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ifb_handler.torchserve import absence
from ifb_handler.torchserve.absence import Absence


class Watched:
    """An Absence, and how often it has called."""

    def __init__(self) -> None:
        self.noticed = threading.Semaphore(0)
        self.absence = Absence(self.noticed.release)

    def call(self, all_written_to: bool) -> None:
        with self.absence.present():
            if all_written_to:
                self.absence.arm()

    def has_noticed(self, seconds: float) -> bool:
        return self.noticed.acquire(timeout=seconds)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(absence, "TICK_SECONDS", 0.005)
    made = Watched()
    yield made
    made.absence.close()


def test_silence_after_all_were_written_to_is_noticed_once_and_again_after_more_calls(watched: Watched) -> None:
    for _ in range(3):
        watched.call(all_written_to=True)
        assert watched.has_noticed(20.0)
        assert not watched.has_noticed(0.15)


def test_silence_is_none_while_some_client_has_not_been_written_to(watched: Watched) -> None:
    watched.call(all_written_to=True)
    watched.call(all_written_to=False)
    assert not watched.has_noticed(0.3)
    watched.call(all_written_to=True)
    assert watched.has_noticed(20.0), "it looks again"


def test_a_call_that_lasts_is_no_silence(watched: Watched) -> None:
    watched.call(all_written_to=True)
    with watched.absence.present():
        assert not watched.has_noticed(0.3)
        watched.absence.arm()
    assert watched.has_noticed(20.0)


def test_nobody_is_woken_for_a_call_while_calls_come(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.call(all_written_to=True)
    woken = []
    monkeypatch.setattr(watched.absence._watching, "set", lambda: woken.append(1))
    for _ in range(100):
        watched.call(all_written_to=True)
    assert not woken


def test_closing_it_ends_the_watch_without_a_last_word(watched: Watched) -> None:
    watched.call(all_written_to=True)
    watched.absence.close()
    assert not watched.has_noticed(0.3)
