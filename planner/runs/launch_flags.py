"""The words of a command line: found in a script, and taken one flag at a time so that the rest is known."""

from __future__ import annotations

import re
import shlex

from meshwright.errors import InputError

MOST_WORDS = 200_000
MOST_LETTERS = 4_000_000
_ASSIGNMENT = re.compile(r"^(?:export\s+|local\s+)?([A-Za-z_]\w*)(\+?)=(.*)$")
_REFERENCE = re.compile(r"\$\{?([A-Za-z_]\w*)(?:\[@\])?\}?")


class Words:
    """Flags with their values. What nobody has taken is left in `unread`."""

    def __init__(self, words: list[str], where: str) -> None:
        self.where = where
        self.words: list[str] = []
        for word in words:
            name, sign, value = word.partition("=")
            self.words += [name, value] if sign and name.startswith("--") else [word]
        self._taken: set[int] = set()

    def has(self, flag: str) -> bool:
        """Whether a flag is there; it counts as read."""
        at = self._find(flag)
        return at is not None

    def text(self, flag: str, default: str | None = None) -> str | None:
        """The value after a flag, the last one where it is repeated."""
        at = self._find(flag)
        if at is None:
            return default
        if at + 1 >= len(self.words):
            raise InputError("needs a value", where=f"{self.where}: {flag}")
        self._taken.add(at + 1)
        return self.words[at + 1]

    def integer(self, flag: str, default: int) -> int:
        """A whole number after a flag. Raises InputError for anything else."""
        value = self.text(flag)
        if value is None:
            return default
        if not re.fullmatch(r"-?\d{1,12}", value):
            raise InputError("must be a whole number", where=f"{self.where}: {flag}", value=value)
        return int(value)

    def several(self, flag: str) -> list[str]:
        """All values after a flag, up to the next one."""
        at, values = self._find(flag), []
        if at is not None:
            for position in range(at + 1, len(self.words)):
                if self.words[position].startswith("--"):
                    break
                self._taken.add(position)
                values.append(self.words[position])
        return values

    def unread(self, harmless: frozenset[str]) -> list[str]:
        """Flags that nobody has asked for and that are not known to leave the step's time as it is."""
        left = [
            word
            for at, word in enumerate(self.words)
            if word.startswith("--")
            and len(word) > 2
            and at not in self._taken
            and word not in harmless
        ]
        return list(dict.fromkeys(left))

    def _find(self, flag: str) -> int | None:
        found = [at for at, word in enumerate(self.words) if word == flag]
        self._taken.update(found)
        return found[-1] if found else None


def words_of(script: str, where: str) -> Words:
    """All words of a shell script, its own variables put in. Nothing is run; `$(...)` stays as it is."""
    lines = script.replace("\\\r\n", " ").replace("\\\n", " ").splitlines()
    values: dict[str, str] = {}
    words: list[str] = []
    for line in _joined_arrays(lines):
        # A quoted array is still one word per element.
        bare = re.sub(r'"(\$\{?\w+\}?(?:\[@\]\}?)?)"', r"\1", line.strip())
        text = _REFERENCE.sub(lambda found: values.get(found[1], found[0]), bare)[:MOST_WORDS]
        assigned = _ASSIGNMENT.match(text)
        if assigned is None:
            words += _split(text)
        else:
            name, plus, value = assigned.groups()
            inner = value[1:-1] if value.startswith("(") and value.endswith(")") else value
            parts = _split(inner) if inner is not value else [" ".join(_split(inner))]
            added = " ".join(map(shlex.quote, parts)) if inner is not value else parts[0]
            values[name] = f"{values.get(name, '')} {added}".strip() if plus else added
        if len(words) > MOST_WORDS or sum(map(len, values.values())) > MOST_LETTERS:
            raise InputError(f"more than {MOST_WORDS} words", where=where)
    return Words([word for word in words if word], where)


def _joined_arrays(lines: list[str]) -> list[str]:
    """Array assignments over several lines as one line each, without their comments."""
    joined: list[str] = []
    inside = False
    for line in lines:
        bare = re.sub(r"(^|\s)#.*$", "", line).strip()
        if inside:
            joined[-1] += f" {bare}"
        else:
            joined.append(bare)
        opened = inside or bool(re.match(r"^\s*(?:\w+\s+)*[A-Za-z_]\w*\+?=\(", bare))
        inside = opened and not bare.endswith(")")
    return joined


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quote that closes on another line
        return text.split()
