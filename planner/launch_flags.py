"""The words of a command line: found in a script, and taken one flag at a time so that the rest is known."""

from __future__ import annotations

import re
import shlex

from model_specs.errors import SpecError

MOST_WORDS = 200_000
_ASSIGNMENT = re.compile(r"^(?:export\s+)?([A-Za-z_]\w*)=(.*)$")
_REFERENCE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?(?:\[@\]\})?")


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
            raise SpecError("needs a value", where=f"{self.where}: {flag}")
        self._taken.add(at + 1)
        return self.words[at + 1]

    def integer(self, flag: str, default: int) -> int:
        """A whole number after a flag. Raises SpecError for anything else."""
        value = self.text(flag)
        if value is None:
            return default
        if not re.fullmatch(r"-?\d{1,12}", value):
            raise SpecError("must be a whole number", where=f"{self.where}: {flag}", value=value)
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
            if word.startswith("--") and len(word) > 2 and at not in self._taken and word not in harmless
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
        assigned = _ASSIGNMENT.match(line.strip())
        text = _REFERENCE.sub(lambda found: values.get(found[1], found[0]), line)[:MOST_WORDS]
        if assigned:
            value = _REFERENCE.sub(lambda found: values.get(found[1], found[0]), assigned[2]).strip()
            if value.startswith("(") and value.endswith(")"):
                values[assigned[1]] = " ".join(map(shlex.quote, _split(value[1:-1])))
            else:
                values[assigned[1]] = " ".join(_split(value))
        words += _split(text)
        if len(words) > MOST_WORDS:
            raise SpecError(f"more than {MOST_WORDS} words", where=where)
    flags = [word.strip("()\"'") if word.startswith(("(--", '"--')) else word for word in words]
    return Words([word for word in flags if word], where)


def _joined_arrays(lines: list[str]) -> list[str]:
    """Array assignments over several lines as one line each."""
    joined: list[str] = []
    inside = False
    for line in lines:
        bare = line.strip()
        if inside:
            joined[-1] += " " + ("" if bare.startswith("#") else bare)
            inside = not bare.endswith(")")
        else:
            joined.append(line)
            inside = bool(re.match(r"^\s*[A-Za-z_]\w*\+?=\(", line)) and not bare.endswith(")")
    return joined


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quote that closes on another line
        return text.split()
