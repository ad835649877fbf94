"""Questions that wait: worked on in turn, ended when they take too long, and forgotten."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from meshwright.errors import InfeasibleError, InputError, OutOfTimeError
from meshwright.planner.solvers.processes import Answerer, Say
from meshwright.serve.queue import PageLimits, QuestionQueue, Ticket, TooManyError

PATIENCE_S = 60.0


def nothing(say: Say) -> dict[str, Any]:
    del say
    return {}


def doubled(number: int, say: Say) -> dict[str, Any]:
    say({"words": f"doubling {number}"})
    say({"row": number})
    return {"answer": 2 * number, "texts": {"number.txt": str(number)}}


def sleeping(seconds: float, say: Say) -> dict[str, Any]:
    say({"words": "asleep"})
    time.sleep(seconds)
    return {"answer": "awake"}


def greedy(size_bytes: int, say: Say) -> dict[str, Any]:
    del say
    return {"answer": len(bytearray(size_bytes))}


@contextmanager
def queue(**limits: Any) -> Iterator[QuestionQueue]:
    opened = QuestionQueue(nothing, PageLimits(**{"at_once": 1, **limits}))
    try:
        yield opened
    finally:
        opened.close()


def ended(ticket: Ticket) -> Ticket:
    done, _ = wait([ticket.ended], PATIENCE_S)
    assert done
    return ticket


def test_questions_are_answered_in_turn_with_what_was_said_before() -> None:
    with queue() as opened:
        tickets = [opened.ask(partial(doubled, number), 10) for number in range(4)]
        assert [ended(ticket).answer for ticket in tickets] == [0, 2, 4, 6]
        document = opened.document(tickets[3])
        assert document["rows"] == [3]
        assert document["words"] == "doubling 3"
        assert document["texts"] == {"number.txt": 1}


@pytest.mark.slow
def test_one_that_takes_too_long_is_ended_and_the_next_is_answered() -> None:
    with queue(grace_s=0.2) as opened:
        slow = opened.ask(partial(sleeping, 600), 0.3)
        after = opened.ask(partial(doubled, 4), 10)
        assert ended(slow).state == "failed"
        assert slow.error is not None
        assert "no answer within 0.5 s" in slow.error["message"]
        assert ended(after).answer == 8


@pytest.mark.slow
def test_one_that_takes_too_much_memory_says_so_and_the_next_is_answered() -> None:
    with queue(memory_bytes=2**30) as opened:
        large = ended(opened.ask(partial(greedy, 2**31), 30))
        assert large.state == "failed"
        assert large.error is not None
        assert "more memory than a task may" in large.error["message"]
        assert ended(opened.ask(partial(greedy, 2**20), 30)).answer == 2**20


@pytest.mark.slow
def test_a_stopped_question_ends_at_once_whether_it_waits_or_not() -> None:
    with queue() as opened:
        working, waiting = (opened.ask(partial(sleeping, 600), 600) for _ in range(2))
        while opened.document(working)["words"] != "asleep":
            time.sleep(0.02)
        assert opened.document(waiting)["state"] == "waiting"
        opened.stop(waiting)
        opened.stop(working)
        assert (ended(working).state, ended(waiting).state) == ("stopped", "stopped")
        assert ended(opened.ask(partial(doubled, 1), 10)).answer == 2
        opened.stop(working)


def test_no_more_wait_than_may() -> None:
    with queue(waiting=2) as opened:
        first = opened.ask(partial(sleeping, 600), 600)
        while opened.document(first)["state"] == "waiting":
            time.sleep(0.02)
        tickets = [opened.ask(nothing, 10) for _ in range(2)]
        assert [opened.document(ticket)["ahead"] for ticket in tickets] == [0, 1]
        with pytest.raises(TooManyError, match="2 questions wait already"):
            opened.ask(nothing, 10)
        opened.stop(first)
        assert {ended(ticket).state for ticket in tickets} == {"done"}


@pytest.mark.parametrize(
    "limits", [{"kept": 3}, pytest.param({"kept_characters": 3}, marks=pytest.mark.slow)]
)
def test_old_answers_are_forgotten(limits: dict[str, int]) -> None:
    with queue(**limits) as opened:
        tickets = [ended(opened.ask(partial(doubled, number), 10)) for number in range(5)]
        for ticket in tickets[:2]:
            with pytest.raises(InputError, match="no such question"):
                opened.ticket(ticket.name)
        assert opened.ticket(tickets[4].name).texts == {"number.txt": "4"}


def test_an_answer_that_took_long_is_not_the_first_to_be_forgotten() -> None:
    opened = QuestionQueue.__new__(QuestionQueue)
    tickets = [Ticket(name=f"q{number}", task=nothing, limit_s=1.0) for number in range(4)]
    opened.limits = PageLimits(kept=2)
    opened._tickets = OrderedDict((ticket.name, ticket) for ticket in tickets)
    for ticket in (*tickets[1:], tickets[0]):
        opened._end(ticket, "done")
    assert list(opened._tickets) == ["q0", "q3"]


@pytest.mark.slow
def test_a_closed_queue_ends_its_processes_and_takes_nothing() -> None:
    with queue(at_once=2) as opened:
        tickets = [opened.ask(partial(sleeping, 600), 600) for _ in range(3)]
        opened.close()
        assert {ended(ticket).state for ticket in tickets} == {"stopped"}
        with pytest.raises(TooManyError):
            opened.ask(nothing, 1)


@pytest.mark.slow
def test_an_answerer_is_ended_from_another_thread() -> None:
    answerer = Answerer()
    assert answerer.answer(partial(doubled, 2), lambda _: None, 30)["answer"] == 4
    threading.Timer(0.5, answerer.end).start()
    with pytest.raises(InfeasibleError, match="the process ended"):
        answerer.answer(partial(sleeping, 600), lambda _: None, 60)
    assert not answerer.is_alive
    answerer = Answerer()
    with pytest.raises(OutOfTimeError, match=r"no answer within 0\.2 s"):
        answerer.answer(partial(sleeping, 600), lambda _: None, 0.2)
    assert not answerer.is_alive
