"""Questions that wait, are worked on and are answered: a few at a time, each in a process of its own.

Nothing here grows without end: a question that would wait behind too many others is refused, one that takes
too long or too much memory is ended, and old answers are forgotten.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from meshwright.errors import InputError, MeshwrightError, message_of
from meshwright.planner.solvers.processes import Answerer, Say, start_thread, usable_cores

Answer = Mapping[str, Any]
_LOADING_S = 120.0
State = Literal["waiting", "working", "done", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class PageLimits:
    """What the page may use of this machine."""

    at_once: int = 0
    """Questions that are worked on side by side; one for every two cores, at most four, when 0."""
    waiting: int = 8
    """Questions that wait; one more is refused."""
    memory_bytes: int = 6 * 2**30
    """Of a process that answers."""
    grace_s: float = 15.0
    """Past the time that a question asks for; then its process is ended."""
    kept: int = 64
    """Answers that can be fetched."""
    kept_characters: int = 128 * 2**20
    """Of the texts of all answers that can be fetched."""
    rows: int = 64
    """That one question may tell on its way."""

    @property
    def processes(self) -> int:
        """Questions that are worked on side by side."""
        return self.at_once or max(1, min(4, usable_cores() // 2))


class TooManyError(MeshwrightError):
    """There is no room for another question now; there will be."""


@dataclass(kw_only=True)
class Ticket:
    """A question from when it was asked to when its answer is forgotten."""

    name: str
    task: Callable[[Say], Answer] | None
    limit_s: float
    state: State = "waiting"
    words: str = ""
    """How it gets on."""
    rows: list[Any] = field(default_factory=list)
    """Parts of the answer that came before it."""
    answer: Any = None
    texts: Mapping[str, str] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None
    ended: Future[None] = field(default_factory=Future)
    """Is done when the question is neither waiting nor worked on any more."""

    def document(self, ahead: int) -> dict[str, Any]:
        """What the page is told, without the texts, whose names and sizes are there.

        Parameters
        ----------
        ahead
            Questions that will be worked on before this one; 0 where it does not wait.
        """
        return {
            "id": self.name,
            "state": self.state,
            "ahead": ahead,
            "words": self.words,
            "rows": self.rows,
            "elapsed_s": (self.ended_s or time.monotonic()) - self.began_s,
            "answer": self.answer,
            "texts": {name: len(text) for name, text in self.texts.items()},
            "error": self.error,
        }


class QuestionQueue:
    """Threads that each hand one question after another to a process.

    Parameters
    ----------
    first
        What each process does before its first question, such as to load what it needs.
    limits
        What may be used.
    """

    def __init__(self, first: Callable[[Say], Any], limits: PageLimits | None = None) -> None:
        self._first = first
        self.limits = limits or PageLimits()
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._tickets: OrderedDict[str, Ticket] = OrderedDict()
        self._working: dict[str, Answerer] = {}
        self._answerers: set[Answerer] = set()
        self._count = self._starting = 0
        self._closed = threading.Event()
        for _ in range(self.limits.processes):
            start_thread(self._work)

    def ask(self, task: Callable[[Say], Answer], limit_s: float) -> Ticket:
        """Puts a question into the queue.

        Parameters
        ----------
        task
            Answers it in another process, with a mapping of `answer` and `texts`, or `error`.
        limit_s
            Seconds that it says it will take at most.

        Raises
        ------
        TooManyError
            If too many wait already.
        """
        with self._changed:
            if len(self._waiting) >= self.limits.waiting or self._closed.is_set():
                what = f"{len(self._waiting)} questions wait already, the most there may be"
                raise TooManyError(f"{what}: ask again when one is answered")
            self._count += 1
            ticket = Ticket(name=f"q{self._count}", task=task, limit_s=limit_s)
            self._waiting.append(ticket)
            self._tickets[ticket.name] = ticket
            self._changed.notify()
            return ticket

    def ticket(self, name: str) -> Ticket:
        """A question by its name. Raises InputError where there is none, or none any more.

        Parameters
        ----------
        name
            As `ask` called it: q1, q2 and so on.
        """
        with self._changed:
            if name not in self._tickets:
                what = f"no such question; the last {self.limits.kept} answers are kept"
                raise InputError(what, where="id", value=name)
            return self._tickets[name]

    def document(self, ticket: Ticket) -> dict[str, Any]:
        """What the page is told of a question.

        Parameters
        ----------
        ticket
            From `ask`.
        """
        with self._changed:
            ahead = self._waiting.index(ticket) if ticket in self._waiting else 0
            return ticket.document(ahead)

    def stop(self, ticket: Ticket) -> None:
        """Ends a question at once, whatever it is at; an answered one is left alone.

        Parameters
        ----------
        ticket
            From `ask`, in any state.
        """
        with self._changed:
            if ticket.state not in ("waiting", "working"):
                return
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            answerer = self._working.get(ticket.name)
            self._end(ticket, "stopped")
            if answerer is not None:
                answerer.end()

    def close(self) -> None:
        """Ends all processes; no question is taken any more."""
        with self._changed:
            self._closed.set()
            for ticket in [*self._tickets.values()]:
                if ticket.state in ("waiting", "working"):
                    self._end(ticket, "stopped")
            self._waiting.clear()
            for answerer in self._answerers:
                answerer.end()
            self._changed.notify_all()
            # A process that is just being started would say that nobody tells it what to do.
            self._changed.wait_for(lambda: not self._starting, _LOADING_S)

    def _work(self) -> None:
        """What each thread does: it has a process ready before there is a question for it."""
        answerer = self._new_answerer()
        while answerer is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed.is_set())
                if self._closed.is_set():
                    return
                ticket = self._waiting.popleft()
                ticket.state = "working"
                self._working[ticket.name] = answerer
            self._answer(ticket, answerer)
            with self._changed:
                del self._working[ticket.name]
            if not answerer.is_alive:
                with self._changed:
                    self._answerers.discard(answerer)
                answerer = self._new_answerer()

    def _new_answerer(self) -> Answerer | None:
        """A process that has loaded what it needs; None where the queue was closed."""
        with self._changed:
            if self._closed.is_set():
                return None
            self._starting += 1
        answerer = Answerer(self.limits.memory_bytes)
        with self._changed:
            self._starting -= 1
            self._answerers.add(answerer)
            self._changed.notify_all()
            if self._closed.is_set():
                answerer.end()
                return None
        # Where it fails, the first question says why.
        with suppress(MeshwrightError):
            answerer.answer(self._first, lambda _: None, _LOADING_S)
        return answerer

    def _answer(self, ticket: Ticket, answerer: Answerer) -> None:
        def hear(message: Any) -> None:
            with self._changed:
                ticket.words = message.get("words", ticket.words)
                if "row" in message and len(ticket.rows) < self.limits.rows:
                    ticket.rows.append(message["row"])

        assert ticket.task is not None
        try:
            answer = answerer.answer(ticket.task, hear, ticket.limit_s + self.limits.grace_s)
        except MeshwrightError as error:
            message, exit_code = message_of(error)
            words = f"{message}; ask for less, or on the command line, which has no such limit"
            answer = {"error": {"message": words, "where": None, "exit_code": int(exit_code)}}
        with self._changed:
            if ticket.state != "working":
                return
            ticket.answer, ticket.error = answer.get("answer"), answer.get("error")
            ticket.texts = answer.get("texts", {})
            self._end(ticket, "done" if ticket.error is None else "failed")

    def _end(self, ticket: Ticket, state: State) -> None:
        """Notes how a question ended, and forgets the oldest answers, never this one."""
        ticket.state, ticket.task, ticket.ended_s = state, None, time.monotonic()
        ticket.ended.set_result(None)
        over = (each for each in self._tickets.values() if each.ended_s is not None)
        done = sorted(over, key=lambda each: each.ended_s or 0.0)
        characters = sum(sum(map(len, each.texts.values())) for each in done)
        for each in done[:-1]:
            if len(done) <= self.limits.kept and characters <= self.limits.kept_characters:
                return
            done.remove(each)
            characters -= sum(map(len, each.texts.values()))
            del self._tickets[each.name]
