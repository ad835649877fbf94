"""How commands talk to the terminal: errors and exit codes, JSON, tables, progress, shared options.

Only this package prints. Heavy modules are imported inside functions, so that `--help` answers at once.
"""

from __future__ import annotations

import _thread
import atexit
import gc
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TextIO, TypeVar

import click

import meshwright
from meshwright.commands.options import GROUPS, example_of, words_of_others
from meshwright.errors import ExitCode, InfeasibleError, message_of, near_miss
from meshwright.planner.solvers.processes import THREAD_COUNTS, start_thread

if TYPE_CHECKING:
    from meshwright.planner.mixed.document import AnyPlan
    from meshwright.planner.report.view import View


# Ctrl-C and SIGTERM end a command at once and in order: files are whole, processes end, exit code 130.


@contextmanager
def interruptible(interrupted: threading.Event) -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt as SIGINT does, and solvers that are at work stop for either.

    Python acts on a signal only between two of its own instructions, so a solver would run to its end first:
    a thread hears of the signal through a pipe and stops it. Where Python can raise nothing, as in a callback
    of a compiled library, it would print KeyboardInterrupt and go on: there the interrupt comes once more. In
    another thread than the main one nothing is changed, as signals are not delivered there.

    Parameters
    ----------
    interrupted
        Set when a signal came: what it interrupts may end in another error than KeyboardInterrupt, such as
        the import of a compiled module.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, telling = os.pipe()
    os.set_blocking(telling, False)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    wakeup_before = signal.set_wakeup_fd(telling, warn_on_full_buffer=False)
    start_thread(_stop_solvers_when_told, heard, interrupted)
    ended = threading.Event()
    unraisable_before = sys.unraisablehook

    def interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            start_thread(_interrupt_soon, ended)
        else:
            unraisable_before(unraisable)

    sys.unraisablehook = interrupt_again
    try:
        yield
    finally:
        ended.set()
        sys.unraisablehook = unraisable_before
        signal.set_wakeup_fd(wakeup_before)
        signal.signal(signal.SIGTERM, before)
        os.close(telling)


def end_children() -> None:
    """Ends the processes that this one started, also those that an interrupt kept from being noted down."""
    import multiprocessing

    for child in multiprocessing.active_children():
        child.kill()


def _stop_solvers_when_told(heard: int, interrupted: threading.Event) -> None:
    """A byte is a signal; the end of the pipe is the end of the command."""
    ends = {signal.SIGINT, signal.SIGTERM}
    while number := os.read(heard, 1):
        if number[0] in ends:
            interrupted.set()
            from meshwright.planner.solvers.programmes import stop_solvers

            stop_solvers()
    os.close(heard)


def _interrupt_soon(ended: threading.Event) -> None:
    """When what swallowed the first interrupt has returned, unless the command has ended by then."""
    if not ended.wait(AGAIN_S):
        _thread.interrupt_main()


_JSON, _DEBUG, _WHY = "meshwright.json", "meshwright.debug", "meshwright.why"
_BEGAN = "meshwright.began"
AGAIN_S = 0.01
"""Until an interrupt that was swallowed comes again: what swallowed it has returned by then."""
LONGEST_WORD = 80
USUAL_WIDTH = 80
"""Of a terminal whose width is not known, in characters."""
_PLAIN = str.maketrans("█·", "#.")
_ONE_LINE = str.maketrans("\n\r", "  ")

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

# What a command loads and computes holds few cycles. Looking for them takes longer than a calculator's
# answer, and as long again when the process ends.
gc.set_threshold(50_000)
atexit.register(gc.freeze)


class Commands(click.Group):
    """Says what a mistyped command may have meant, and turns every error into a message and an exit code."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands in groups, with their first sentences whole and an example of each group."""
        named = {name for examples in GROUPS.values() for name in examples}
        ungrouped = [name for name in self.list_commands(ctx) if name not in named]
        for title, examples in {**GROUPS, "Others": dict.fromkeys(ungrouped, "")}.items():
            rows = [(name, _first_sentence(self.commands[name])) for name in examples]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        formatter.write_paragraph()
        formatter.write_text("Each command's --help has an example. Begin with:")
        formatter.write(f"{example_of('plan')}\n")

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Adds a command; its example stands under its help."""
        example = example_of(name or cmd.name or "")
        if example and not cmd.epilog:
            cmd.epilog = f"\b\nExample:\n{example}"
        super().add_command(cmd, name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if (
            not name.startswith("-")
            and self.get_command(ctx, name) is None
            and not ctx.resilient_parsing
        ):
            near = _meant("commands", name) or near_miss(name, self.commands)
            hint = f" Did you mean {near!r}?" if near else ""
            ctx.fail(
                f"No such command {name[:LONGEST_WORD]!r}.{hint} Commands: {', '.join(self.commands)}."
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        interrupted = threading.Event()
        ctx.meta[_BEGAN] = time.monotonic()
        _open_closed_streams()
        # Looking for other packages' plugins takes pydantic longer than a calculator its answer.
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
        # Threads of numpy's library would wait for work in a loop, and get none: products here are small.
        for name in THREAD_COUNTS:
            os.environ.setdefault(name, "1")
        try:
            with interruptible(interrupted), ctx.scope(cleanup=False):
                result = super().invoke(ctx)
                sys.stdout.flush()
                return result
        except BrokenPipeError:
            # What is still buffered has no reader either.
            _to_nobody(sys.stdout)
            ctx.exit(ExitCode.DONE)
        except KeyboardInterrupt:
            _end_interrupted(ctx)
        except (click.exceptions.Exit, click.Abort):
            raise
        except click.ClickException as error:
            shown = _plainly(error)
            if type(error) is click.BadOptionUsage:
                shown = _with_choices(error, self.commands.get(ctx.invoked_subcommand or ""))
            _json_error(ctx, shown.format_message(), shown.exit_code)
            raise shown from None
        except Exception as error:
            if interrupted.is_set():
                _end_interrupted(ctx)
            if ctx.meta.get(_DEBUG) and not isinstance(error, InfeasibleError):
                raise
            message, exit_code = message_of(error)
            command = self.commands.get(ctx.invoked_subcommand or "")
            _fail(ctx, as_typed(message, command), exit_code)


_FIELDS_OF_OPTIONS = {
    "top_k": "--top",
    "time_limit_s": "--time-limit",
    "images: tokens": "--image-tokens",
}
"""Fields of requests whose option has another name."""


def as_typed(message: str, command: click.Command | None) -> str:
    """A message about a field of a request, with the option of the command that says it.

    Parameters
    ----------
    message
        Of an InputError: the field, a colon, what is wrong.
    command
        That was called; None where none was.

    Examples
    --------
    >>> as_typed("top_k: 0 is out of range (layouts)", click.Command("plan"))
    '--top: 0 is out of range (layouts)'
    """
    named = dict(_FIELDS_OF_OPTIONS)
    for parameter in [] if command is None else command.params:
        if isinstance(parameter, click.Option):
            typed = parameter.opts[-1]
            named |= dict.fromkeys((str(parameter.name), typed.lstrip("-")), typed)
    for field, typed in named.items():
        if re.match(rf"{re.escape(field)}(?=:| \w+:)", message):
            return typed + message.removeprefix(field)
    return message


def _meant(kind: str, word: str) -> str | None:
    """What to write for a word of other programs, by `kind` of it; None where none is known."""
    rows: dict[str, str] = words_of_others()[kind]
    return next((written for written, words in rows.items() if word in words.split()), None)


def _of_another_name(error: click.NoSuchOption) -> str | None:
    """What to write in place of an option that other programs have; None where none is known.

    An option of another name is said where the command has it.
    """
    name = error.option_name.lstrip("-").replace("_", "-").lower()
    if name in words_of_others()["without_price"].split():
        return "It changes no price: leave it out here."
    from meshwright.planner.request.choices import DEGREES, degree_meant

    axis = degree_meant(name) or name
    written = f"--pin {axis}=N" if axis in DEGREES else _meant("options", name)
    params = [] if error.ctx is None else error.ctx.command.params
    options = {option for param in params for option in param.opts}
    if any(isinstance(param, click.Argument) and param.name == name for param in params):
        return f"Write it without {error.option_name}, as {name.upper()}."
    if written is not None and written.split()[0] in options:
        return f"Write {written}."
    reads_runs = any(
        param.metavar == "RUN.yaml" for param in params if isinstance(param, click.Argument)
    )
    if reads_runs and (written is not None or not error.possibilities):
        launch = (
            " Beside a launch file, --with says what it leaves open." if "--with" in options else ""
        )
        return (
            "Its run file says that: `schema run` explains the fields; of `plan` it may be an option."
            + launch
        )
    reads_plans = any(str(param.metavar).startswith("PLAN") for param in params)
    if reads_plans and not error.possibilities and _is_asked_of_plans(error):
        return "A plan keeps what it was made for: ask `plan` again with this option."
    return None


def _is_asked_of_plans(error: click.NoSuchOption) -> bool:
    """Whether `plan` has the option."""
    group = None if error.ctx is None else error.ctx.find_root().command
    plan = group.commands.get("plan") if isinstance(group, click.Group) else None
    return plan is not None and any(error.option_name in param.opts for param in plan.params)


_WORDS_OF_MISSING = {
    "cluster": "`catalog clusters` lists names; a cluster YAML is taken too.",
    "node": "The kind of all nodes: `catalog clusters` lists names.",
    "global_batch": "Sequences of one optimizer step, on all GPUs together.",
}
"""By parameter, what helps to say it."""


def _with_choices(error: click.BadOptionUsage, command: click.Command | None) -> click.UsageError:
    """The error, with the names that an option without its value takes."""
    params = [] if command is None else command.params
    kinds = [param.type for param in params if error.option_name in param.opts]
    if not kinds or not isinstance(kinds[0], click.Choice):
        return error
    return click.UsageError(
        f"{error.message} Choose from {', '.join(kinds[0].choices)}.", error.ctx
    )


def _plainly(error: click.ClickException) -> click.ClickException:
    """The error, with what to write for a number refused for its unit, or an option of another name."""
    if isinstance(error, click.NoSuchOption):
        written = _of_another_name(error)
        if written is None:
            begun = [each for each in error.possibilities or () if error.option_name in each]
            likely = begun or error.possibilities
            return click.NoSuchOption(error.option_name, possibilities=likely, ctx=error.ctx)
        return click.UsageError(f"No such option {error.option_name!r}. {written}", ctx=error.ctx)
    if not isinstance(error, click.BadParameter):
        return error
    if isinstance(error, click.MissingParameter):
        words = _WORDS_OF_MISSING.get(str(getattr(error.param, "name", "")), error.message)
        return click.MissingParameter(words, ctx=error.ctx, param=error.param)
    words = in_digits(error.message, str(getattr(error.param, "name", "")))
    if words == error.message:
        return error
    return click.BadParameter(words, ctx=error.ctx, param=error.param, param_hint=error.param_hint)


_NOT_A_NUMBER = re.compile(
    r"'[$€£¥]?(?P<digits>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>[A-Za-z]{1,5}|[eE]1?[0-9])' is not a valid "
    r"(?:integer|float)"
)
_PRODUCT = re.compile(
    r"'(?:(?P<nodes>[1-9][0-9]{0,5}) ?[xX*] ?)?(?P<each>[0-9]{1,6}|[0-9]{1,3}(?:,[0-9]{3}){1,4})' "
    r"is not a valid integer"
)
"""Nodes times GPUs, or a number with commas."""
_HEXADECIMAL = re.compile(r"'(?P<typed>0[xX][0-9A-Fa-f]{1,12})' is not a valid integer")
_PRICE = re.compile(r"'[$€£¥] ?(?P<digits>[0-9]+(?:\.[0-9]+)?)' is not a valid float")
_GPUS_OF_A_KIND = re.compile(
    r"'(?:[A-Za-z][\w-]{0,31}[xX:])?(?P<digits>[0-9]{1,6})(?: ?[xX*:] ?[A-Za-z][\w-]{0,31})?' "
    r"is not a valid integer"
)
"""8xH100 and H100:8, as others write GPUs of a kind."""
_SAME_IN_DIGITS = re.compile(r"'(?P<digits>[0-9]{1,12})\.0*' is not a valid integer")
_POWERS_OF_TEN = {"k": 3, "m": 6, "g": 9, "b": 9, "t": 12}
_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def _number_of(message: str) -> str | None:
    """The number behind one refused: a product, with commas, with a point, hexadecimal or a price."""
    if (product := _PRODUCT.match(message)) is not None:
        return str(int(product["nodes"] or 1) * int(product["each"].replace(",", "")))
    if (hexadecimal := _HEXADECIMAL.match(message)) is not None:
        return str(int(hexadecimal["typed"], 16))
    same = _PRICE.match(message) or _SAME_IN_DIGITS.match(message)
    return None if same is None else str(same["digits"])


def in_digits(message: str, name: str = "") -> str:
    """What to write where a number of the parameter `name` was refused for its unit.

    Parameters
    ----------
    message
        What click says of the value.
    name
        The parameter's: where it counts GiB or seconds, or GPUs, another advice follows.

    Examples
    --------
    >>> in_digits("'2h' is not a valid float range.", "time_limit_s")
    "'2h' is not a number: write 7200, in seconds."
    >>> in_digits("'8xH100' is not a valid integer.", "gpus")
    "'8xH100' is not a whole number: write 8, and the kind of GPU in --cluster."
    >>> in_digits("'1M' is not a valid float.", "tokens_per_s")
    "'1M' is not a number: write 1e6."
    >>> in_digits("'15T' is not a valid float range.")
    "'15T' is not a number: write 15e12."
    >>> in_digits("'4k' is not a valid integer.")
    "'4k' is not a whole number: write 4000 or 4096."
    >>> in_digits("'5GB' is not a valid float.")
    "'5GB' is not a number: write its digits alone, without a unit."
    >>> in_digits("'2x8' is not a valid integer.")
    "'2x8' is not a whole number: write 16."
    >>> in_digits("'0x100' is not a valid integer.")
    "'0x100' is not a whole number: write 256."
    >>> in_digits("'$2' is not a valid float range.")
    "'$2' is not a number: write 2."
    """
    is_whole = "integer" in message
    advice = _instead_of(message, name, is_whole=is_whole)
    if advice is None:
        return message
    what = "a whole number" if is_whole else "a number"
    return f"{message.partition(' is not')[0]} is not {what}: write {advice}."


def _instead_of(message: str, name: str, *, is_whole: bool) -> str | None:
    if (number := _number_of(message)) is not None:
        return number
    if name == "gpus" and (kind := _GPUS_OF_A_KIND.match(message)) is not None:
        return f"{kind['digits']}, and the kind of GPU in --cluster"
    typed = _NOT_A_NUMBER.match(message)
    return None if typed is None else _without_unit(typed, name, is_whole=is_whole)


def _without_unit(typed: re.Match[str], name: str, *, is_whole: bool) -> str:
    digits, unit = str(typed["digits"]), str(typed["unit"])
    if name.endswith("_s") and not name.endswith("_per_s"):
        seconds = _SECONDS.get(unit.lower())
        in_seconds = f"{float(digits) * seconds:g}, in seconds" if seconds else ""
        return in_seconds or "seconds, in digits alone"
    power = int(unit[1:]) if unit[1:].isdecimal() else _POWERS_OF_TEN.get(unit.lower(), 0)
    if power == 0 or "gib" in name:
        return "its digits alone, without a unit"
    if not is_whole:
        return f"{digits}e{power}"
    decimal, binary = (
        f"{float(digits) * scale:.0f}" for scale in (10**power, 2 ** (power * 10 // 3))
    )
    return decimal + (f" or {binary}" if unit.isalpha() else "")


def say(text: str = "", *, err: bool = False) -> None:
    """Prints a line. Once its reader has gone (`| head`) it goes nowhere, and the command goes on: files are
    written, and the exit code tells of the answer.

    Parameters
    ----------
    text
        The line, without its end.
    err
        Whether it goes to standard error.

    Raises
    ------
    OSError
        Where it cannot be written otherwise, as on a full disk.
    """
    _print(_escaped(text), err=err)


def _escaped(text: str) -> str:
    """The text with what could steer a terminal as JSON escapes it: names of a file may hold anything."""
    if all(line.isprintable() for line in text.split("\n")):
        return text
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else json.dumps(letter)[1:-1]
        for letter in text
    )


def _print(text: str, *, err: bool = False) -> None:
    try:
        click.echo(text, err=err)
    except OSError as error:
        # Python would try what it has kept once more at its end, and change the exit code.
        _to_nobody(sys.stderr if err else sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise


def _open_closed_streams() -> None:
    """Opens to nobody what the caller closed (`>&-`, or a service without a terminal)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _to_nobody(stream: TextIO) -> None:
    """Whoever read a stream has enough: the rest of it goes nowhere."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def _end_interrupted(ctx: click.Context) -> NoReturn:
    end_children()
    say("Interrupted.", err=True)
    ctx.exit(ExitCode.INTERRUPTED)


def _first_sentence(command: click.Command) -> str:
    """What a command does, in the first sentence of its help."""
    words = " ".join((command.help or "").split())
    sentence = words.partition(". ")[0]
    return sentence if sentence.endswith(".") else f"{sentence}."


def _fail(ctx: click.Context, message: str, exit_code: int) -> None:
    say(f"Error: {message}", err=True)
    _json_error(ctx, message, exit_code)
    ctx.exit(exit_code)


def _json_error(ctx: click.Context, message: str, exit_code: int) -> None:
    """With --json there is a document on standard output, whatever happens, if it can be written at all."""
    if ctx.meta.get(_JSON):
        with suppress(OSError):
            say(json.dumps({"schema": 1, "error": {"message": message, "exit_code": exit_code}}))


def print_json(document: dict[str, Any]) -> None:
    """The one JSON document of a command: what goes wrong after it is only said on standard error.

    Parameters
    ----------
    document
        Plain data; what JSON cannot hold becomes null.
    """
    from meshwright.documents import json_text

    say(json_text(document))
    click.get_current_context().meta[_JSON] = False


def give(as_json: bool, document: dict[str, Any], view: Callable[[], View]) -> None:
    """Prints a document where --json asks for it, else a view.

    Parameters
    ----------
    as_json
        Whether --json was given.
    document
        What it prints.
    view
        Makes what is printed otherwise.
    """
    if as_json:
        print_json(document)
    else:
        show(view())


def show(view: View) -> None:
    """Prints a view; characters that the output cannot carry are replaced.

    Parameters
    ----------
    view
        Blocks as `planner.report.view` has them, in their order.
    """
    from rich.console import Console

    from meshwright.planner.report.view import printed

    console = Console(markup=False, emoji=False, highlight=False)
    # COLUMNS is 0 where a program that starts others does not know it.
    console.width = console.width or USUAL_WIDTH
    with console.capture() as captured:
        for block in view:
            console.print(printed(block))
    shown = "\n".join(text.rstrip() for text in captured.get().splitlines())
    encoding = sys.stdout.encoding or "utf-8"
    if not encoding.lower().startswith("utf"):
        shown = shown.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    # Its cells are free of control characters; colours are not.
    _print(shown)


def answer(
    document: dict[str, Any], view: Callable[[dict[str, Any]], View], calculator: str
) -> None:
    """Prints the answer of a calculator: a document or a view, with what is behind it where --why asks.

    Parameters
    ----------
    document
        What the calculator found; its `operation` chooses among formulas.
    view
        Makes of it what is printed without --json.
    calculator
        Name of the command.
    """
    meta = click.get_current_context().meta
    if meta[_WHY]:
        from meshwright.planner.calculators.formulas import formulas

        document["formulas"] = formulas(calculator, document.get("operation"))
    if meta[_JSON]:
        print_json(document)
        return
    from meshwright.planner.report.calculators_view import formulas_view

    show([*view(document), *formulas_view(document.get("formulas", []))])


def warn_of_edits(*plans: AnyPlan) -> None:
    """Warns of plans whose file was changed after it was written: their proofs are those of other plans."""
    from meshwright.planner.plan.document import digest_of

    edited = any(plan.digest not in (None, digest_of(plan)) for plan in plans)
    words = (
        "the plan was edited after it was written: what it states need not hold any more; "
        "`meshwright verify` says what does not"
    )
    warn("warning", [words] if edited else [])


def warn(words: str, lines: Iterable[str]) -> None:
    for text in lines:
        say(f"{words}: {text}", err=True)


def write_plan(directory: Path, files: Mapping[str, str], force: bool) -> None:
    """Writes the files of a plan, and warns of those that an earlier plan left beside them.

    Parameters
    ----------
    directory
        Where they go; made if need be.
    files
        Texts by name.
    force
        Whether files that are there are replaced.
    """
    from meshwright.documents import left_over, write_files
    from meshwright.planner.launch.plan_files import PLAN_FILES
    from meshwright.planner.plan.texts import MIXED_FILE

    write_files(directory, files, force)
    words = left_over(directory, (MIXED_FILE, *PLAN_FILES), files)
    warn("warning", [] if words is None else [words])


FIRST_LOOK_S = 0.3
"""A command that is done sooner than this shows no progress, if it reports none."""
NEXT_LOOK_S = 0.2


class ProgressLine:
    """One line on standard error, with the seconds of the command and what was last said, that is overwritten
    until its block ends; silent but on a terminal. It moves on while nothing is said, so that nobody takes a
    long search for one that hangs.

    Parameters
    ----------
    text
        What is said until something else is.
    """

    def __init__(self, text: str = "working") -> None:
        self._terminal = sys.stderr.isatty()
        context = click.get_current_context(silent=True)
        began = {} if context is None else context.meta
        self._start: float = began.get(_BEGAN, time.monotonic())
        self._next = 0.0
        self._text = text
        self._ending, self._ended = threading.Event(), threading.Event()

    def __call__(self, text: str) -> None:
        self._text = text
        if self._terminal and time.monotonic() - self._start >= self._next:
            self._draw()

    def __enter__(self) -> Self:
        if self._terminal:
            start_thread(self._keep_drawing)
        return self

    def __exit__(self, *error: object) -> None:
        """Removes the line."""
        if self._terminal:
            self._ending.set()
            self._ended.wait(timeout=1.0)
            self._write("\r\x1b[K")

    def _keep_drawing(self) -> None:
        wait_s = max(FIRST_LOOK_S - (time.monotonic() - self._start), 0.0)
        while not self._ending.wait(wait_s):
            self._draw()
            wait_s = NEXT_LOOK_S
        self._ended.set()

    def _draw(self) -> None:
        now = time.monotonic() - self._start
        self._next = now + 0.1
        width = (os.get_terminal_size(sys.stderr.fileno()).columns or USUAL_WIDTH) - 1
        words = _escaped(f"{now:6.1f} s  {self._text}".translate(_ONE_LINE))
        self._write(f"\r\x1b[K{words[:width]}")

    def _write(self, text: str) -> None:
        """Past the buffer of standard error, whose lock a copy of this process would find taken for good."""
        encoding = sys.stderr.encoding or "utf-8"
        with suppress(OSError):
            os.write(sys.stderr.fileno(), text.encode(encoding, "replace"))


def _remember(key: str) -> Callable[[click.Context, click.Parameter, bool], bool]:
    def store(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        ctx.meta[key] = ctx.meta.get(key, False) or value
        return value

    return store


def common(command: Decorated, *, is_passed: bool = True) -> Decorated:
    """--json and --debug, which every command has; `is_passed` where the command takes `as_json` itself.

    Parameters
    ----------
    command
        A function, or what decorators have made of it.
    is_passed
        Whether the function has a parameter `as_json`.
    """
    option = click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,
        callback=_remember(_JSON),
        expose_value=is_passed,
        help="Print one JSON document instead of tables.",
    )
    return debug(option(command))


def answered(command: Decorated) -> Decorated:
    """--why, --json and --debug of a command that ends in `answer`.

    Parameters
    ----------
    command
        A function, or what decorators have made of it.
    """
    return why_option(common(command, is_passed=False))


debug = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_remember(_DEBUG),
    help="Tracebacks.",
)
why_option = click.option(
    "--why",
    is_flag=True,
    expose_value=False,
    callback=_remember(_WHY),
    help="Say the formula and the source of every number.",
)
force_option = click.option(
    "--force", is_flag=True, help="Replace files that are already in the folder."
)


def _show_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    say(f"meshwright {meshwright.__version__}")
    ctx.exit()


version_option = click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version.",
)
