"""What may go wrong, and the exit code that the command line ends with; both stand here once.

Every error that meshwright raises on purpose is a `MeshwrightError`; its text is a sentence for the user:

>>> raise InputError("must be at most 8", where="--pin: tp", value=16)
Traceback (most recent call last):
    ...
meshwright.errors.InputError: --pin: tp: must be at most 8, got 16
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import IntEnum
from functools import wraps
from inspect import Parameter, signature
from itertools import islice
from numbers import Integral, Real
from os import PathLike
from typing import Any, ClassVar, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

LONGEST_VALUE = 80
"""Characters of a user's text that a message repeats."""
LONGEST_CHOICE_LIST = 60
"""Choices that a message lists."""
LISTED_BESIDE_A_GUESS = 12
"""Choices that a message lists beside the one that was likely meant."""
MOST_COMPARED = 500
"""Choices that a misspelt word is compared with."""


class ExitCode(IntEnum):
    """What the process of a command ends with."""

    DONE = 0
    NO_ANSWER = 1
    """No plan exists, or a check failed."""
    BAD_INPUT = 2
    NO_TIME = 3
    """The time limit came before any plan."""
    INTERNAL = 70
    INTERRUPTED = 130


class MeshwrightError(Exception):
    """Any error that meshwright raises on purpose; `exit_code` is what the command line ends with."""

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL


class InternalError(MeshwrightError, RuntimeError):
    """A fault of meshwright, never of the user: a plan that fails its own verification, for instance."""


class InfeasibleError(MeshwrightError, ValueError):
    """The input is well formed, but what it asks for does not exist, or a check failed."""

    exit_code = ExitCode.NO_ANSWER


class OutOfTimeError(MeshwrightError):
    """The time limit came before any answer."""

    exit_code = ExitCode.NO_TIME


class InputError(MeshwrightError, ValueError):
    """An option, a file or a field that cannot be used. The message says where, what, and what to do.

    Parameters
    ----------
    what
        What is wrong, as the end of a sentence: "must be at least 1".
    where
        File and field, or option.
    value
        What the user wrote, if it tells anything.
    allowed
        Everything that would be accepted, where that can be listed.
    did_you_mean
        The accepted choice that is nearest to the value.
    """

    exit_code = ExitCode.BAD_INPUT

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        value: object = ...,
        allowed: Iterable[str] = (),
        did_you_mean: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.allowed = tuple(allowed)
        self.did_you_mean = did_you_mean
        text = f"{where}: {what}" if where else what
        if value is not ...:
            text += f", got {shown(value)}"
        super().__init__(text + _remedy(did_you_mean, self.allowed))


def shown(value: object) -> str:
    """A value as a message can carry it: short, printable, and safe for any size or nesting.

    Parameters
    ----------
    value
        Of any type; numbers and texts are repeated, of others kind and size are said.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        # Python refuses to print integers of more than 4,300 digits.
        bits = value.bit_length()
        return str(value) if bits < 200 else f"an integer of {bits} bits"
    if isinstance(value, str):
        end = "..." if len(value) > LONGEST_VALUE else ""
        return repr(value[:LONGEST_VALUE]) + end
    if isinstance(value, dict):
        return f"a mapping of {len(value)} keys"
    if isinstance(value, list | tuple | set):
        return f"a list of {len(value)} items"
    return repr(value) if isinstance(value, float) else f"a {type(value).__name__}"


def name_text(name: str, longest: int = LONGEST_VALUE) -> str:
    """A name as a message can carry it: as it is, or quoted and cut where it is long or cannot be printed.

    Parameters
    ----------
    name
        Of any length, with any characters.
    longest
        Characters that are not cut, at least 1.
    """
    return name if name.isprintable() and len(name) <= longest else shown(name)


def require_whole(name: str, value: object) -> None:
    """Raises InputError for what is no whole number; True and 8.0 are none.

    Parameters
    ----------
    name
        The argument, for the message.
    value
        What was given; numpy's integers are whole numbers too.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError("is not a whole number", where=name, value=value)


def given_path(value: object, where: str) -> str:
    """The text of a name or a path. Raises InputError for anything else, such as a number or bytes.

    Parameters
    ----------
    value
        What a caller gave.
    where
        The argument, for the message.
    """
    text = value.__fspath__() if isinstance(value, PathLike) else value
    if not isinstance(text, str):
        raise InputError("must be a name or a path", where=where, value=type(value).__name__)
    return text


def require_number(name: str, value: object) -> None:
    """Raises InputError for what is no real number; True is none.

    Parameters
    ----------
    name
        The argument, for the message.
    value
        What was given; numpy's numbers are numbers too, and so are infinity and NaN.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError("is not a number", where=name, value=value)


def texts_of(value: object, where: str) -> list[str]:
    """A text, or each of several. Raises InputError for anything else, such as a number."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, Iterable) and not isinstance(texts, bytes):
        texts = list(texts)
        if all(isinstance(text, str) for text in texts):
            return texts
    raise InputError("must be a text, or several", where=where, value=value)


def separate_words(texts: Iterable[str] | str, where: str) -> tuple[str, ...]:
    """The words of a comma-separated text, or of several, without repeats.

    Parameters
    ----------
    texts
        As a user gave them: a caller of Python may have given anything.
    where
        The option, for the message.

    Raises
    ------
    InputError
        For what is no text.
    """
    words = (word.strip() for text in texts_of(texts, where) for word in text.split(","))
    return tuple(dict.fromkeys(word for word in words if word))


def _require_texts(name: str, value: object) -> None:
    """Raises InputError for what is neither a text nor several; what can be read once is checked then."""
    if not isinstance(value, Iterator):
        texts_of(value, name)


def _require_each(require: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """A check of several values, each by `require`; a text or a mapping is no such list."""

    def check(name: str, values: object) -> None:
        if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
            raise InputError("must be a list", where=name, value=values)
        if not isinstance(values, Iterator):
            for value in values:
                require(name, value)

    return check


_CHECKS: dict[str, Callable[[str, object], None]] = {
    "int": require_whole,
    "float": require_number,
    "Sequence[int]": _require_each(require_whole),
    "Sequence[float]": _require_each(require_number),
    "Sequence[str]": _require_texts,
    "Iterable[str] | str": _require_texts,
    "Collection[str] | str": _require_texts,
}
"""By what annotations say of a value, beside None."""


def known_keywords(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A function that refuses keywords and values of a wrong type in words, as every other input.

    Parameters
    ----------
    function
        Takes no keywords but its parameters.

    Returns
    -------
    callable
        The same, which raises InputError for a keyword that is no parameter, with what it may have meant, and
        for numbers and texts that are none.
    """
    several = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    own = signature(function).parameters.values()
    types = {each.name: str(each.annotation) for each in own if each.kind not in several}
    in_turn = [each.name for each in own if each.kind == Parameter.POSITIONAL_OR_KEYWORD]

    @wraps(function)
    def checked(*args: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        refuse_unknown(keywords, types, where=function.__name__)
        for name, value in (*zip(in_turn, args, strict=False), *keywords.items()):
            check = _CHECKS.get(types[name].removesuffix(" | None"))
            if check and not (value is None and types[name].endswith(" | None")):
                check(name, value)
        return function(*args, **keywords)

    return checked


def refuse_unknown(
    names: Iterable[str], known: Collection[str], *, where: str, what: str = "is no argument"
) -> None:
    """Raises InputError for the first name that is none of those known to `where`; `what` is said of it.

    Parameters
    ----------
    names
        As they were given.
    known
        Those that there are.
    where
        The function, option or file that they were given to, for the message.
    what
        The end of its sentence.
    """
    for name in names:
        near = None if name in known else near_miss(name, known)
        check_choice(name, known, where, what, near)


def check_choice(
    value: object,
    allowed: Collection[Any],
    where: str,
    what: str,
    did_you_mean: str | None = None,
) -> None:
    """Raises InputError for a value that is none of those allowed; `what` is said of it.

    Parameters
    ----------
    value
        What was given.
    allowed
        What may be, in the order in which the message lists it.
    where
        The argument, for the message.
    what
        The end of its sentence, such as "no such part".
    did_you_mean
        The one that was likely meant; none is named when None.
    """
    if value not in allowed:
        raise InputError(what, where=where, value=value, allowed=allowed, did_you_mean=did_you_mean)


def listed(choices: Collection[str], most: int = LONGEST_CHOICE_LIST) -> str:
    """Choices joined by commas, cut short where there are more than `most`.

    Parameters
    ----------
    choices
        In the order in which they are listed.
    most
        How many are, at least 1.
    """
    names = list(choices)
    unlisted = len(names) - most
    text = ", ".join(names[:most])
    return f"{text}, and {unlisted} more" if unlisted > 0 else text


def message_of(error: Exception) -> tuple[str, ExitCode]:
    """What a user is told of any exception, and the exit code that it ends a command with.

    Parameters
    ----------
    error
        Of any kind; only errors that meshwright and the system raise on purpose are the user's.

    Returns
    -------
    (str, ExitCode)
        The message is a sentence, or several lines of them.
    """
    if isinstance(error, MeshwrightError) and error.exit_code != ExitCode.INTERNAL:
        return str(error), error.exit_code
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return place + error.strerror, ExitCode.BAD_INPUT
    if isinstance(error, ImportError):
        return f"the installation is incomplete: {error}", ExitCode.INTERNAL
    words = "This is a fault in meshwright, not in your input; --debug shows where it happened."
    return f"internal error, {type(error).__name__}: {error}. {words}", ExitCode.INTERNAL


def suggestion(word: object, choices: Iterable[str]) -> str:
    """The end of a message about an unknown word: the near miss, if there is one, and what is allowed.

    Parameters
    ----------
    word
        As it was typed; of anything but a text no near one is named.
    choices
        That there are; they are listed in alphabetical order.

    >>> suggestion("lama", ["llama", "gpt"])
    " (did you mean 'llama'?); allowed: gpt, llama"
    """
    names = sorted(choices)
    return _remedy(near_miss(word, names), names)


def _remedy(did_you_mean: str | None, allowed: Collection[str]) -> str:
    if did_you_mean is None:
        return f"; allowed: {listed(allowed)}" if allowed else ""
    text = f" (did you mean {did_you_mean!r}?)"
    return f"{text}; allowed: {listed(allowed, LISTED_BESIDE_A_GUESS)}" if allowed else text


def near_miss(word: object, choices: Iterable[str]) -> str | None:
    """The choice that a misspelt word or a part of a name most likely meant, or None.

    Parameters
    ----------
    word
        As it was typed; None is returned for anything but a text.
    choices
        That there are, of which the first 500 are looked at.

    >>> near_miss("Flash Atention", ["flash_attention", "eager"])
    'flash_attention'
    >>> near_miss("gb300", ["dgx-b300", "gb300-nvl72"])
    'gb300-nvl72'
    >>> near_miss("h200", ["gh200", "dgx-h200"])
    'dgx-h200'
    >>> near_miss("hgx-h100", ["hgx-h800", "dgx-h100"])
    'dgx-h100'
    >>> near_miss("id", ["kind", "name"])
    """
    if not isinstance(word, str):
        return None
    # The choices may be the keys of a hostile document.
    bounded = islice((choice for choice in choices if len(choice) <= LONGEST_VALUE), MOST_COMPARED)
    by_plain = {_plain(choice): choice for choice in bounded}
    plain = _plain(word[:LONGEST_VALUE])
    # A name that holds the word, such as "gb300-nvl72" of "gb300", before one that only looks like it; a
    # number of a GPU as a word of its own before a part of another.
    holding = [name for name in by_plain if plain in name] if len(plain) > 2 else []
    if not plain.isalpha():
        holding = [name for name in holding if f"_{plain}_" in f"_{name}_"] or holding
    likeness = 0.6 if len(plain) > 2 else 0.75
    # hgx-h100 is nearer to dgx-h100, the same GPU, than to hgx-h800.
    numbers = {part for part in plain.split("_") if not part.isalpha() and not part.isdecimal()}
    alike = [name for name in by_plain if numbers & set(name.split("_"))]
    close = difflib.get_close_matches(
        plain, holding or alike or by_plain, n=1, cutoff=0.0 if holding else likeness
    ) or difflib.get_close_matches(plain, by_plain, n=1, cutoff=likeness)
    return by_plain[close[0]] if close else None


def _plain(word: str) -> str:
    return word.lower().replace("-", "_").replace(" ", "_")
