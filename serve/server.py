"""The page's server: it listens on this machine alone, and every request carries the token of its address.

| request | answers |
|---|---|
| `GET /TOKEN/` | the page; `GET /TOKEN/page/NAME` its parts |
| `GET /TOKEN/offer` | names and limits of its controls |
| `POST /TOKEN/ask/KIND` | 202 and a ticket: `plan`, `sizes`, `fewest`, `compare`, `launch`, `report` |
| `GET /TOKEN/answers/ID` | how the question gets on, and its answer |
| `GET /TOKEN/answers/ID/NAME` | a text of the answer: `plan.yaml`, `plan.json`, `launch.zip`, `report.html` |
| `DELETE /TOKEN/answers/ID` | ends the question |

What goes wrong is `{"error": {"message", "where", "exit_code"}}`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from meshwright.documents import parse_mapping
from meshwright.errors import InputError, MeshwrightError
from meshwright.serve import answers
from meshwright.serve.answers import (
    LONGEST_S,
    CompareQuestion,
    FewestQuestion,
    FilesQuestion,
    Offer,
    PlanQuestion,
    SizesQuestion,
    read_question,
)
from meshwright.serve.queue import PageLimits, QuestionQueue, TooManyError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOST = "127.0.0.1"
MOST_BODY_BYTES = 64 * 2**10
SENDING_S = 10.0
"""In which the head of a request must have come whole, and then its body."""
MOST_CONNECTIONS = 64
TOKEN_BYTES = 24
_EXTRA = "the page needs starlette and uvicorn: pip install 'meshwright[serve]'"
_REPORT_PAGE = "meshwright.planner.report", "page"
_OWN_PAGE = "meshwright.serve", "page"
_PARTS = {
    "page.css": (_REPORT_PAGE, "text/css"),
    "echarts.min.js": (_REPORT_PAGE, "text/javascript"),
    "serve.css": (_OWN_PAGE, "text/css"),
    "serve.js": (_OWN_PAGE, "text/javascript"),
}
"""Files of the page, where they lie, and what they are: style and chart library are the report's."""
_TEXTS = {
    ".yaml": "application/yaml",
    ".json": "application/json",
    ".csv": "text/csv",
    ".svg": "image/svg+xml",
    ".html": "text/html",
    ".zip": "application/zip",
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FILE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; sandbox allow-scripts"
)
"""Of files that are shown: they reach nothing, not even this server."""


_Asked = tuple[answers.AnsweredBy, float]
"""What answers a question, and its seconds at most."""
_TOO_LARGE = 413, f"at most {MOST_BODY_BYTES:,} bytes may be sent"


class Guard:
    """Refuses what does not come from the page itself, and what is too large or too slow.

    A request must name this machine as its host (a page elsewhere that has a name of its own lead here does
    not), carry the token, and come from no other origin.

    Parameters
    ----------
    app
        Gets the requests that may pass, their bodies whole.
    token
        First part of every path.
    port
        That is listened on.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token = app, token.encode()
        self._hosts = {f"{name}:{port}".encode() for name in (HOST, "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or hands it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal, body = self._refusal(scope), None
        if refusal is None:
            try:
                body = await asyncio.wait_for(_whole_body(receive), SENDING_S)
                refusal = _TOO_LARGE if body is None else None
            except TimeoutError:
                refusal = 408, f"the request did not come whole within {SENDING_S:g} s"
        if refusal is not None:
            response = error_response(*refusal)
            # The rest of the body is not waited for.
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            return next(messages, None) or await receive()

        await self._app(scope, replay, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return 403, "this page is for this machine alone: its host is 127.0.0.1 or localhost"
        first = scope["path"].split("/")[1:2]
        if not first or not secrets.compare_digest(first[0].encode(errors="replace"), self._token):
            return 403, "the address has a token, which meshwright serve printed; it is another one"
        for origin in headers.get(b"origin", []):
            if origin.lower() not in {b"http://" + host for host in self._hosts}:
                return 403, "another page must not ask"
        length = headers.get(b"content-length", [b"0"])[0]
        if not length.isdigit() or len(length) > 9 or int(length) > MOST_BODY_BYTES:
            return _TOO_LARGE
        return None


async def _whole_body(receive: Receive) -> bytes | None:
    """The bytes of a request; None where there are too many."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MOST_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def error_response(status: int, message: str, **others: Any) -> Response:
    """An error as the page reads it.

    Parameters
    ----------
    status
        Of HTTP; 429 asks to come again in 2 seconds.
    message
        A sentence for the user.
    others
        Fields of the error beside it, such as `where`.
    """
    from starlette.responses import JSONResponse

    error = {"message": message, "where": None, "exit_code": 2, **others}
    headers = {**_HEADERS, **({"Retry-After": "2"} if status == 429 else {})}
    return JSONResponse({"error": error}, status, headers)


class PlannerPage:
    """What answers the page's requests.

    Parameters
    ----------
    offer
        Models and clusters that may be asked about.
    queue
        Works on the questions.
    """

    def __init__(self, offer: Offer, queue: QuestionQueue) -> None:
        self._offer, self._queue = offer, queue
        # More copies would only wait for a core.
        from meshwright.planner.solvers.processes import usable_cores

        self._copies = max(1, usable_cores() // queue.limits.processes)

    async def page(self, request: Request) -> Response:
        """The page, or one of its parts.

        Parameters
        ----------
        request
            With the `name` of a part in its path, or without for the page itself.
        """
        name = request.path_params.get("name", "index.html")
        if name == "index.html":
            return _response(
                _part(_OWN_PAGE, name), "text/html", {"Content-Security-Policy": _POLICY}
            )
        if name not in _PARTS:
            return error_response(404, "no such part of the page")
        place, kind = _PARTS[name]
        return _response(_part(place, name), kind)

    async def offer(self, request: Request) -> Response:
        """What the controls offer."""
        del request
        return _json(await asyncio.to_thread(self._offer.document))

    async def ask(self, request: Request) -> Response:
        """Takes a question; its answer is fetched later.

        Parameters
        ----------
        request
            With the `kind` of question in its path and its fields as a JSON body.

        Returns
        -------
        Response
            202 with the ticket; 400, 404, 415 or 429 with the error.
        """
        asked = self._questions().get(request.path_params["kind"])
        if asked is None:
            return error_response(404, "no such kind of question", where="kind")
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return error_response(415, "a question is sent as application/json")
        try:
            text = (await request.body()).decode()
            fields = parse_mapping(text, "question")
            task, limit_s = await asyncio.to_thread(asked, fields)
            ticket = self._queue.ask(task, limit_s)
        except UnicodeDecodeError:
            return error_response(400, "a question is sent as UTF-8")
        except TooManyError as error:
            return error_response(429, str(error))
        except MeshwrightError as error:
            return error_response(400, **answers.error_document(error))
        return _json(self._queue.document(ticket), 202)

    async def answer(self, request: Request) -> Response:
        """How a question gets on, or its end (DELETE).

        Parameters
        ----------
        request
            GET or DELETE, with the ticket's `id` in its path.
        """
        ticket = self._queue.ticket(request.path_params["id"])
        if request.method == "DELETE":
            self._queue.stop(ticket)
        return _json(self._queue.document(ticket))

    async def text(self, request: Request) -> Response:
        """A text of an answer, to be kept or shown.

        Parameters
        ----------
        request
            With the ticket's `id` and the `name` of a text in its path.
        """
        name = request.path_params["name"]
        ticket = self._queue.ticket(request.path_params["id"])
        if name not in ticket.texts:
            return error_response(404, "this answer has no such file", where="name")
        ending = re.sub(r".*(?=\.)", "", name)
        data = ticket.texts[name].encode()
        if ending == ".zip":
            data = base64.b64decode(data)
        headers = {"Content-Security-Policy": _FILE_POLICY}
        if ending != ".html":
            headers["Content-Disposition"] = f'attachment; filename="{name}"'
        return _response(data, _TEXTS[ending], headers)

    def _questions(self) -> Mapping[str, Callable[[Mapping[str, object]], _Asked]]:
        return {
            "plan": lambda fields: self._job(answers.answer_plan, PlanQuestion, fields),
            "sizes": lambda fields: self._job(answers.answer_sizes, SizesQuestion, fields),
            "fewest": lambda fields: self._job(answers.answer_fewest, FewestQuestion, fields),
            "compare": self._comparison,
            "launch": lambda fields: self._files(answers.answer_launch, fields),
            "report": lambda fields: self._files(answers.answer_report, fields),
        }

    def _job(
        self, function: answers.Function, kind: type[PlanQuestion], fields: Mapping[str, object]
    ) -> _Asked:
        question = read_question(kind, fields)
        resolved = self._offer.resolved(question)
        return answers.AnsweredBy(function, resolved, self._copies), question.time_limit

    def _comparison(self, fields: Mapping[str, object]) -> _Asked:
        question = read_question(CompareQuestion, fields)
        sides = {"first": question.first, "second": question.second}
        texts = {side: self._plan_of(name) for side, name in sides.items()}
        return answers.AnsweredBy(answers.answer_comparison, texts, 1), LONGEST_S

    def _files(self, function: answers.Function, fields: Mapping[str, object]) -> _Asked:
        question = read_question(FilesQuestion, fields)
        resolved = {"plan": self._plan_of(question.plan), "target": question.target}
        return answers.AnsweredBy(function, resolved, 1), LONGEST_S

    def _plan_of(self, name: str) -> str:
        """The text of a plan that was found before."""
        texts = self._queue.ticket(name).texts
        if "plan.yaml" not in texts:
            raise InputError("is no plan that was found", where="plan", value=name)
        return texts["plan.yaml"]


def _json(document: Mapping[str, Any], status: int = 200) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(document, status, _HEADERS)


def _response(content: bytes, kind: str, headers: Mapping[str, str] | None = None) -> Response:
    from starlette.responses import Response

    return Response(content, headers={**_HEADERS, **(headers or {})}, media_type=kind)


@cache
def _part(place: tuple[str, str], name: str) -> bytes:
    package, folder = place
    return resources.files(package).joinpath(folder, name).read_bytes()


def page_app(offer: Offer, queue: QuestionQueue, token: str, port: int) -> Starlette:
    """The application: its routes behind the guard.

    Parameters
    ----------
    offer
        Models and clusters that may be asked about.
    queue
        Works on the questions; it is closed when the application ends.
    token
        First part of every path.
    port
        That is listened on.

    Raises
    ------
    InputError
        If the extra is not installed.
    """
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.routing import Mount, Route
    except ImportError:
        raise InputError(_EXTRA, where="serve") from None

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        queue.close()

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(error.status_code, error.detail)

    async def not_there(_: Request, error: Exception) -> Response:
        return error_response(404, **answers.error_document(error))

    page = PlannerPage(offer, queue)
    routes = [
        Route("/", page.page),
        Route("/page/{name}", page.page),
        Route("/offer", page.offer),
        Route("/ask/{kind}", page.ask, methods=["POST"]),
        Route("/answers/{id}", page.answer, methods=["GET", "DELETE"]),
        Route("/answers/{id}/{name}", page.text),
    ]
    return Starlette(
        routes=[Mount(f"/{token}", routes=routes)],
        middleware=[Middleware(Guard, token=token, port=port)],
        exception_handlers={HTTPException: refused, InputError: not_there},
        lifespan=lifespan,
    )


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def listening(port: int) -> socket.socket:
    """A socket of this machine alone.

    Parameters
    ----------
    port
        1 to 65,535; 0 for any that is free.

    Raises
    ------
    InputError
        If the port is taken or not allowed.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        what = f"cannot be listened on ({error.strerror}); leave it out for any that is free"
        raise InputError(what, where="--port", value=port) from None
    return listener


def prompt_protocol() -> type[asyncio.Protocol]:
    """HTTP of uvicorn for senders that are prompt; by itself it waits for the rest of a head for ever."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class PromptProtocol(H11Protocol):
        deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.await_head()

        def await_head(self) -> None:
            """Hangs up in a while if no whole head has come; each piece of one does not begin it anew."""
            if self.conn.their_state is h11.IDLE:
                if self.deadline is None:
                    hang_up = self.timeout_keep_alive_handler
                    self.deadline = self.loop.call_later(SENDING_S, hang_up)
            elif self.deadline is not None:
                self.deadline.cancel()
                self.deadline = None

    return PromptProtocol


def serve_page(
    offer: Offer,
    listener: socket.socket,
    token: str,
    limits: PageLimits | None = None,
    when_ready: Callable[[], None] = lambda: None,
) -> None:
    """Answers until it is interrupted.

    Parameters
    ----------
    offer
        Models and clusters that may be asked about.
    listener
        From `listening`.
    token
        From `new_token`.
    limits
        What the page may use of this machine.
    when_ready
        Is called once connections are taken.

    Raises
    ------
    InputError
        If the extra is not installed.
    """
    try:
        import uvicorn
    except ImportError:
        raise InputError(_EXTRA, where="serve") from None
    queue = QuestionQueue(answers.load, limits)
    try:
        listener.listen()
        when_ready()
        config = uvicorn.Config(
            page_app(offer, queue, token, listener.getsockname()[1]),
            http=prompt_protocol(),
            ws="none",
            loop="asyncio",
            access_log=False,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=1,
        )
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        queue.close()
        listener.close()
