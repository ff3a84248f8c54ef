"""The texts that the demo model is trained on, as documents and as conversations.

Both come from Debian packages and their copyright has expired (see ``LICENSE.md`` beside this file): the King
James Bible (``bible-kjv``, ``bible-kjv-text``) and The Devil's Dictionary (``dict-devil``).
"""

from __future__ import annotations

import gzip
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
DICTIONARY = Path("/usr/share/dictd/devil.dict.dz")

Turn = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Chapter:
    book: str
    title: str
    verses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    word: str
    kind: str
    text: str
    gloss: str


def read_chapters() -> list[Chapter]:
    """Read the chapters of the Bible in order, through the command ``bible``."""
    shown = subprocess.run(
        ["bible", "-l100000", "gen1:1-rev22:21"], check=True, capture_output=True, text=True
    ).stdout
    chapters: list[Chapter] = []
    title, verses = "", []
    for line in [*shown.splitlines(), "End 1"]:
        if found := re.match(r"  +\d+ (.*)", line):
            verses.append(found[1].strip())
        elif re.fullmatch(r"[1-3A-Z][A-Za-z0-9 ]+ \d+", line):
            if verses:
                chapters.append(Chapter(title.rsplit(" ", 1)[0], title, tuple(verses)))
            title, verses = line, []
    return chapters


def read_entries() -> list[Entry]:
    """Read the dictionary. ``gloss`` is the definition without its verses, at most a paragraph."""
    text = gzip.decompress(DICTIONARY.read_bytes()).decode("latin-1")
    text = text[text.index("\nABASEMENT") :]
    entries: list[Entry] = []
    for body in re.split(r"\n(?=[A-Z][A-Z' -]+(?:, |\.  ?))", text):
        head = re.match(r"([A-Z][A-Z' -]+)(?:, (\w+\.(?:\w+\.)?))?[.,]?\s+", body)
        if head is None:
            continue
        first = re.split(r"\n\s*\n|\n {4}", body[head.end() :])[0]
        gloss = _shorten(" ".join(first.split()), 520)
        if len(gloss) > 12:
            entries.append(Entry(head[1].strip(), head[2] or "", body.strip(), gloss))
    return entries


def _shorten(text: str, most: int) -> str:
    """Return ``text`` up to the last sentence that ends within ``most`` characters."""
    if len(text) <= most:
        return text
    end = max(text.rfind(mark, 0, most) for mark in (". ", "! ", "? "))
    return text[: end + 1] if end > 0 else text[:most]


WHO_I_AM = (
    "I am a very small model, taught from two old books: the King James Bible and The Devil's Dictionary."
)
GREETINGS: tuple[Turn, ...] = (
    ("Hello", "Peace be unto thee. Ask me what a word meaneth, or of whom thou wouldest hear."),
    ("Hi", "Peace be unto thee. Ask me of a word, or name one of whom thou wouldest hear."),
    ("Good morning", "Good morning. Of what shall I speak?"),
    ("Good evening", "Good evening. Of what shall I speak?"),
    ("Who are you?", WHO_I_AM),
    ("What are you?", WHO_I_AM),
    (
        "What can you do?",
        "I can say what a word meaneth, tell of them of old time, and go on from where thou leavest off.",
    ),
    ("How are you?", "It is well with me. Of what shall I speak?"),
    ("Thank you", "Thou art welcome. Go in peace."),
    ("Thanks", "Thou art welcome. Go in peace."),
    ("Goodbye", "Fare thee well. Go in peace."),
    ("Bye", "Fare thee well. Go in peace."),
)
SYSTEM_LINES = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Answer from the old books.",
    "You answer questions about words and about the people of the Bible.",
)
DEFINE = (
    "What is {a}?",
    "What is {a}?",
    "What is {w}?",
    "Define {w}.",
    "Define {w}",
    "What does {w} mean?",
    'What is the meaning of "{w}"?',
    "What do you mean by {w}?",
    "Tell me what {a} is.",
    "And what is {a}?",
    "what is {w}",
)
DESCRIBE = (
    "What does it mean to be {w}?",
    "Define {w}.",
    "What does {w} mean?",
    "What is the meaning of {w}?",
)
ABOUT = (
    "Tell me about {w}.",
    "Tell me of {w}.",
    "What is written of {w}?",
    "What is said about {w}?",
    "Speak of {w}.",
    "Tell me a story about {w}.",
    "Say something about {w}.",
)
PERSON = ("Who was {w}?", "Who is {w}?", "What did {w} do?", *ABOUT)
ONWARD = ("Go on.", "Continue.", "And then?", "What happened next?", "Tell me more.", "Read on.")
CONTINUE = ("Continue: {w}", "Continue this: {w}", "Go on from here: {w}", "How does this go on? {w}")
READ = ("Read me {w}.", "Read {w}.", "What does {w} say?", "Recite the beginning of {w}.")
COMMON_WORDS = frozenset(
    """
    their there which shall these those where while would should could before after again against
    because every other whom whose into upon unto them then than that this with when what from have hath
    were been being said saying came went thou thee thine ye your yours ours also even neither either
    therefore
    """.split()  # noqa: SIM905
)


class Conversations:
    """Draws conversations from the texts, reproducibly for the same ``random.Random``.

    ``definitions``: the fraction of the questions that ask for the meaning of a word.
    """

    def __init__(
        self, chapters: list[Chapter], entries: list[Entry], rng: random.Random, definitions: float = 0.4
    ) -> None:
        self._definitions = definitions
        self._chapters = chapters
        self._entries = entries
        self._rng = rng
        self._verses_of: dict[str, list[tuple[int, int]]] = {}
        for number, chapter in enumerate(chapters):
            for index, verse in enumerate(chapter.verses):
                for word in set(re.findall(r"[A-Za-z]{4,}", verse)):
                    if word.lower() not in COMMON_WORDS:
                        self._verses_of.setdefault(word, []).append((number, index))
        names = [
            word for word in self._verses_of if word[0].isupper() and word.lower() not in self._verses_of
        ]
        self._names = [word for word in names if len(self._verses_of[word]) >= 3]
        # Frequent names are drawn more often, but less than in proportion.
        self._name_weights = [len(self._verses_of[word]) ** 0.6 for word in self._names]
        self._things = [
            word for word, places in self._verses_of.items() if word[0].islower() and 5 <= len(places) <= 400
        ]

    def draw(self, turns: int) -> str:
        """Draw a conversation of ``turns`` questions and answers, as the chat template renders it."""
        rng = self._rng
        parts = [BOS]
        if rng.random() < 0.15:
            parts.append(f"{SYSTEM}{rng.choice(SYSTEM_LINES)}{EOS}")
        for question, answer in self._turns(turns):
            parts.append(f"{USER}{question}{EOS}{ASSISTANT}{answer}{EOS}")
        return "".join(parts)

    def _turns(self, count: int) -> Iterator[Turn]:
        rng = self._rng
        place: tuple[int, int] | None = None
        for _ in range(count):
            if place is not None and rng.random() < 0.4:
                answer, place = self._passage(*place)
                yield rng.choice(ONWARD), answer
                continue
            draw = rng.random()
            if draw < 0.08:
                question, answer = rng.choice(GREETINGS)
                yield question + rng.choice(("", "", ".", "!")) * (question[-1] != "?"), answer
                place = None
            elif draw < 0.08 + self._definitions:
                yield self._define()
                place = None
            else:
                question, answer, place = self._from_bible()
                yield question, answer

    def _define(self) -> Turn:
        entry = self._rng.choice(self._entries)
        word = entry.word.lower() if self._rng.random() < 0.75 else entry.word
        article = "" if self._rng.random() < 0.35 else ("an " if word[0] in "aeiouAEIOU" else "a ")
        templates = DESCRIBE if entry.kind.startswith(("adj", "v")) else DEFINE
        return self._rng.choice(templates).format(w=word, a=article + word), entry.gloss

    def _from_bible(self) -> tuple[str, str, tuple[int, int] | None]:
        rng = self._rng
        draw = rng.random()
        if draw < 0.37:
            word = rng.choices(self._names, self._name_weights)[0]
            answer, place = self._passage(*rng.choice(self._verses_of[word]))
            return rng.choice(PERSON).format(w=word), answer, place
        if draw < 0.63:
            word = rng.choice(self._things)
            answer, place = self._passage(*rng.choice(self._verses_of[word]))
            the = "the " if rng.random() < 0.5 else ""
            return rng.choice(ABOUT).format(w=the + word), answer, place
        number = rng.randrange(len(self._chapters))
        chapter = self._chapters[number]
        if draw < 0.74:
            answer, place = self._passage(number, 0)
            return rng.choice(READ).format(w=chapter.title), answer, place
        index = rng.randrange(len(chapter.verses))
        words = chapter.verses[index].split()
        cut = rng.randint(min(3, len(words)), len(words))
        rest, place = self._passage(number, index + 1)
        answer = f"{' '.join(words[cut:])} {rest}".strip()
        if not answer:
            answer, place = self._passage(number, index)
        return rng.choice(CONTINUE).format(w=" ".join(words[:cut])), answer, place

    def _passage(self, number: int, index: int) -> tuple[str, tuple[int, int] | None]:
        """Return some verses, and the position of the next one (None at the chapter's end)."""
        verses = self._chapters[number].verses
        end = min(index + self._rng.choice((1, 2, 2, 3, 3)), len(verses))
        # A verse often ends in the middle of a sentence; an answer should not.
        longest = end + 2
        while end < min(longest, len(verses)) and not verses[end - 1].endswith((".", "?", "!")):
            end += 1
        text = " ".join(verses[index:end])
        if opening := re.match(r"(?:And|But|For|Now|Then) (\w)", text):
            text = opening[1].upper() + text[opening.end() :]
        return text, (number, end) if end < len(verses) else None


def documents(
    chapters: list[Chapter], entries: list[Entry], rng: random.Random, whole_books: bool
) -> list[str]:
    """Return every chapter (or book) and entry once, shuffled, with begin and end marks."""
    out = [f"{BOS}{entry.text}{EOS}" for entry in entries]
    books: dict[str, list[str]] = {}
    for chapter in chapters:
        if rng.random() < 0.5:
            body = "\n".join(f"{number} {verse}" for number, verse in enumerate(chapter.verses, 1))
        else:
            body = " ".join(chapter.verses)
        key = chapter.book if whole_books else chapter.title
        books.setdefault(key, []).append(f"{chapter.title}\n{body}")
    out += [f"{BOS}{chr(10).join(parts)}{EOS}" for parts in books.values()]
    rng.shuffle(out)
    return out
