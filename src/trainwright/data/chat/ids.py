"""Ids of a rendered chat, as the tokenizer gives them in use, but for special tokens that only data spells.

What a tokenizer does around its special tokens is its own: some put a space mark behind each, some take in the white
space beside them. So a chat is read as one text by the tokenizer itself. In that text a stand-in takes the place of
every special token that the template writes: an added token with the same options, spelt by code points that no data
holds. The tokenizer is told to leave its own special tokens alone, so one that a message spells is text.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from trainwright.core.errors import DataError, ModelError
from trainwright.data.tokenizers._fast import FastTokenizer
from trainwright.data.tokenizers.base import Tokenizer

STAND_IN = "\ufdd3"  # begins every stand-in; no character and never will be one
_FIRST = 0xF0000  # a second code point, of a private plane, tells stand-ins apart

Place = tuple[int, int, int]  # of a special token in a text: start, stop, id
Stretch = tuple[int, int, list[int]]  # between special tokens: start, stop, ids

# What a special token is tried out in; it stands for {}.
_TRIALS = ("{}", "{}{}", "a {} b", "{}\n a\n\n{} {}b\n")


class Cut(NamedTuple):
    """Ids, the place of each cut among them, and which cuts lie within a token of the whole text."""

    ids: list[int]
    places: list[int]
    within: list[int]


class Encoder(ABC):
    """Text with special tokens at given places to ids; ``special`` has the text of every special token and its id."""

    def __init__(self, tokenizer: Tokenizer, special: Mapping[str, int]):
        self.tokenizer, self._names = tokenizer, {i: text for text, i in special.items()}
        self._tried: set[int] = set()

    def encode(self, text: str, special: Sequence[Place] = (), cuts: Sequence[int] = ()) -> Cut:
        """Ids of ``text`` and the place among them of each of ``cuts`` (characters, ascending).

        No token reaches over a cut: where one of the whole text does, what lies before it and what goes on behind it
        are encoded apart. Raises DataError where that gives another text, and ModelError for a tokenizer whose
        special tokens are not read as such where the chat has them.
        """
        for token in {token for _, _, token in special} - self._tried:
            self._try_out(token)
            self._tried.add(token)
        ids: list[int] = []
        places: list[int] = []
        within: list[int] = []
        todo = list(cuts)
        for k, (low, high, tokens) in enumerate(self._stretches(text, special)):
            behind = special[k][0] if k < len(special) else len(text)
            here = [cut for cut in todo if cut <= behind]
            del todo[: len(here)]
            # A cut in the white space that a special token takes in lies before or behind that token.
            inside = [cut - low for cut in here if low < cut < high]
            begun = sum(cut <= low for cut in here)
            at = [0] * begun
            if inside:
                first = len(places) + begun
                part = self._part(special[k - 1][2] if k else None, text[low:high], inside, tokens)
                tokens = part.ids
                at += part.places
                within += [first + i for i in part.within]
            at += [len(tokens)] * (len(here) - len(at))
            places += [len(ids) + n for n in at]
            ids += tokens
            if k < len(special):
                ids.append(special[k][2])
        return Cut(ids, places, within)

    def _part(self, before: int | str | None, text: str, cuts: Sequence[int], ids: list[int]) -> Cut:
        places: list[int] = []
        for i, cut in enumerate(cuts):
            head = self._read(before, text[:cut])
            if ids[: len(head)] == head:
                places.append(len(head))
                continue
            one = self._part(before, text[:cut], cuts[:i], head)
            rest, after = text[cut:], [c - cut for c in cuts[i + 1 :]]
            two = self._part("text", rest, after, self._read("text", rest))
            self._check_same(ids, one.ids + two.ids)
            n = len(one.ids)
            return Cut(
                one.ids + two.ids,
                [*one.places, n, *(n + place for place in two.places)],
                [*one.within, i, *(i + 1 + k for k in two.within)],
            )
        return Cut(ids, places, [])

    def _check_same(self, whole: list[int], parted: list[int]) -> None:
        a, b = (self.tokenizer.decode(ids, skip_special=True) for ids in (whole, parted))
        if a != b:
            raise DataError(
                f"an answer begins or ends within a token, and the tokenizer cannot part the text there ({a[:60]!r} "
                f"would become {b[:60]!r}); let it begin behind a space or a line's end"
            )

    @abstractmethod
    def _stretches(self, text: str, special: Sequence[Place]) -> Sequence[Stretch]:
        """What lies before, between and behind special tokens, without the white space that these take in."""

    @abstractmethod
    def _read(self, before: int | str | None, text: str) -> list[int]:
        """Ids of ``text`` behind nothing (None), behind a special token (its id) or behind other text ("text")."""

    @abstractmethod
    def _try_out(self, token: int) -> None:
        """Raises ModelError where the tokenizer, left to itself, reads the special token in another way."""

    def _unread(self, tokens: Iterable[int]) -> ModelError:
        names = ", ".join(repr(self._names[i]) for i in sorted(tokens))
        return ModelError(
            f"the tokenizer reads its special tokens {names} in a way of its own where the chat template writes them, "
            "so the ids would not be those of use; give these tokens normalized: false and single_word: false in "
            "tokenizer.json, or take another tokenizer"
        )


def make_encoder(tokenizer: Tokenizer, special: Mapping[str, int]) -> Encoder:
    """The encoder for ``tokenizer``; ``special`` has the text of every special token and its id."""
    by_backend = isinstance(tokenizer, FastTokenizer) and type(tokenizer).encode is FastTokenizer.encode
    return (BackendEncoder if by_backend else PieceEncoder)(tokenizer, special)


class BackendEncoder(Encoder):
    """For a tokenizer that the `tokenizers` library runs."""

    def __init__(self, tokenizer: Tokenizer, special: Mapping[str, int]):
        super().__init__(tokenizer, special)
        self._stand_ins = {i: STAND_IN + chr(_FIRST + k) for k, i in enumerate(self._names)}
        self._real: dict[int, int] = {}  # id of a stand-in -> that of the special token
        self._backend = self._copy() if special else tokenizer.backend  # type: ignore[attr-defined]
        self._inside: Any = None  # made when it is first needed

    def _copy(self) -> Any:
        import tokenizers

        copy = tokenizers.Tokenizer.from_str(self.tokenizer.backend.to_str())  # type: ignore[attr-defined]
        copy.post_processor = None  # it adds nothing here, and takes white space out of offsets
        copy.encode_special_tokens = True
        options = copy.get_added_tokens_decoder()
        stand_ins = []
        for i, spelt in self._stand_ins.items():
            own = options.get(i)
            kept = {} if own is None else {k: getattr(own, k) for k in ("single_word", "lstrip", "rstrip")}
            normalized = own is not None and own.normalized
            stand_ins.append(tokenizers.AddedToken(spelt, special=False, normalized=normalized, **kept))
        # The library numbers new tokens by the count of old ones: where ids have gaps, others have to come first.
        gaps = self.tokenizer.vocab_size - copy.get_vocab_size(with_added_tokens=True)
        copy.add_tokens([STAND_IN + STAND_IN + chr(_FIRST + k) for k in range(gaps)])
        copy.add_tokens(stand_ins)
        self._real = {int(copy.token_to_id(spelt) or 0): i for i, spelt in self._stand_ins.items()}
        if min(self._real) < self.tokenizer.vocab_size:
            raise ModelError("the tokenizer's ids have gaps, so chats cannot be encoded; number its tokens anew")
        return copy

    def _stretches(self, text: str, special: Sequence[Place]) -> Sequence[Stretch]:
        parts: list[str] = []
        ends: list[int] = []  # of the stand-ins
        at = length = 0
        for start, stop, token in special:
            parts += [text[at:start], self._stand_ins[token]]
            length += start - at + len(self._stand_ins[token])
            ends.append(length)
            at = stop
        found = self._backend.encode("".join([*parts, text[at:]]), add_special_tokens=False)
        raw, offsets = found.ids, found.offsets
        where = [n for n, i in enumerate(raw) if i in self._real]
        real, want = [self._real[raw[n]] for n in where], [token for _, _, token in special]
        if real != want:
            raise self._unread(Counter(want) - Counter(real))
        out: list[Stretch] = []
        first = low = 0
        for n, end, (start, stop, token) in zip(where, ends, special, strict=True):
            taken = end - len(self._stand_ins[token]) - offsets[n][0], offsets[n][1] - end  # white space beside it
            out.append((low, start - max(taken[0], 0), raw[first:n]))
            first, low = n + 1, stop + max(taken[1], 0)
        return [*out, (low, len(text), raw[first:])]

    def _read(self, before: int | str | None, text: str) -> list[int]:
        if before == "text":
            if self._inside is None:
                self._inside = _inside_of_text(self.tokenizer.backend)  # type: ignore[attr-defined]
            return self._inside.encode(text, add_special_tokens=False).ids
        if before is None:
            return self._backend.encode(text, add_special_tokens=False).ids
        return self._backend.encode(self._stand_ins[int(before)] + text, add_special_tokens=False).ids[1:]

    def _try_out(self, token: int) -> None:
        for text in _TRIALS:
            ids = self._backend.encode(text.replace("{}", self._stand_ins[token]), add_special_tokens=False).ids
            self._backend.encode_special_tokens = False
            want = self._backend.encode(text.replace("{}", self._names[token]), add_special_tokens=False).ids
            self._backend.encode_special_tokens = True
            if [self._real.get(i, i) for i in ids] != want:
                raise self._unread([token])


def _inside_of_text(backend: Any) -> Any:
    """``backend`` for text that goes on where other text ends: it puts no space before it and takes none away."""
    import tokenizers

    spec = json.loads(backend.to_str())
    spec["normalizer"] = _without_prefix(spec.get("normalizer"))
    spec["pre_tokenizer"] = _without_prefix(spec.get("pre_tokenizer"))
    copy = tokenizers.Tokenizer.from_str(json.dumps(spec))
    copy.encode_special_tokens = True
    return copy


def _without_prefix(part: Any) -> Any:
    if part is None or part["type"] == "Prepend":
        return None
    part = dict(part)
    for members in ("normalizers", "pretokenizers"):
        if members in part:
            part[members] = [new for member in part[members] if (new := _without_prefix(member)) is not None]
    for option, value in (("prepend_scheme", "never"), ("add_prefix_space", False), ("strip_left", False)):
        if option in part:
            part[option] = value
    return part


class PieceEncoder(Encoder):
    """For any other tokenizer: what lies between special tokens is encoded piece by piece."""

    def _stretches(self, text: str, special: Sequence[Place]) -> Sequence[Stretch]:
        bounds = [0, *(edge for start, stop, _ in special for edge in (start, stop)), len(text)]
        return [
            (low, high, self._read(None, text[low:high])) for low, high in zip(bounds[::2], bounds[1::2], strict=True)
        ]

    def _read(self, before: int | str | None, text: str) -> list[int]:
        return list(self.tokenizer.encode(text)) if text else []

    def _try_out(self, token: int) -> None:
        theirs = getattr(self.tokenizer, "_tokenizer", None)  # that of transformers
        if theirs is None:
            return
        for text in _TRIALS:
            ids: list[int] = []
            for n, piece in enumerate(text.split("{}")):
                ids += [token] * (n > 0) + self._read(None, piece)
            if ids != theirs.encode(text.replace("{}", self._names[token]), add_special_tokens=False):
                raise self._unread([token])
