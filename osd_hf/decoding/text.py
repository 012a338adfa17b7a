"""Propose candidates from past text: what followed the last tokens where they occurred before."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

ORDERS = (1, 2, 4, 8)  # numbers of last tokens that are looked up
MAX_MATCH_TOKENS = 32
MAX_PLACES = 32  # newest places that are compared
MAX_VISITED_PLACES = 256  # including those of other tokens with the same hash
SEPARATOR = -1  # between texts that do not follow each other
HASH_FACTOR = 0x9E3779B1
MAX_INDEXED_TOKENS = 1 << 30  # after which an index starts again
BYTES_PER_TOKEN = 4 + len(ORDERS) * (4 + 4)
EARLIER_TEXT_BYTES = 1 << 26  # of all earlier text
MATCH_LENGTH_EDGES = (2, 3, 4, 6, 10, 16, 32)

OWN, OWNER, DOMAIN = 0, 1, 2  # kinds of text: of the request, of its owner, of its domain


class Guess(NamedTuple):
    """A token that may come next."""

    token: int
    kind: int  # of text
    length: int  # tokens before it that match
    votes: int  # places with such a match that it follows
    places: int  # places with such a match

    @property
    def situation(self) -> tuple[int, int, int]:
        """What guesses have in common that are right equally often."""
        if self.places == 1:
            agreement = 1
        elif self.votes == self.places:
            agreement = 3
        else:
            agreement = 2 if 2 * self.votes > self.places else 0
        return self.kind, bisect_right(MATCH_LENGTH_EDGES, self.length), agreement


class TextIndex:
    """Index tokens by the 1, 2, 4, and 8 tokens before them, as hash chains. An index takes 36 bytes per token; beyond
    its capacity, the newest tokens replace the oldest. Places that are found are compared token by token."""

    def __init__(self, capacity: int, kind: int = OWN) -> None:
        self.kind = kind
        self._capacity = 1 << (max(capacity, 1).bit_length() - 1)
        self._lock = threading.RLock()
        self._clear(min(256, self._capacity))

    def _clear(self, size: int) -> None:
        self._size = size
        self._count = 0
        self._tokens = array("i", bytes(4 * size))  # replaced when the size changes
        nothing = array("i", [-1]) * size
        self._heads = [nothing[:] for _ in ORDERS]  # hash -> newest place
        self._earlier = [nothing[:] for _ in ORDERS]  # place -> the place before it with the same hash
        self._last: list[int] = []  # tokens since the last separator, newest first

    def __len__(self) -> int:
        return min(self._count, self._size)

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self._size * BYTES_PER_TOKEN

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens that follow those before. A `SEPARATOR` ends a text: later tokens do not follow it."""
        with self._lock:
            if self._count >= MAX_INDEXED_TOKENS:
                self._clear(self._size)
            if self._count + len(tokens) > self._size < self._capacity:
                held, needed = self._tokens[: self._count], self._count + len(tokens)
                self._clear(min(1 << (needed - 1).bit_length(), self._capacity))
                self.extend(held)
            for token in tokens:
                self._append(token)

    def _append(self, token: int) -> None:
        place, mask, last = self._count, self._size - 1, self._last
        slot = place & mask
        self._tokens[slot] = token
        self._count += 1
        if token == SEPARATOR:
            last.clear()
            return
        last.insert(0, token)
        del last[ORDERS[-1] :]
        for head, earlier, code in zip(self._heads, self._earlier, _hashes(last), strict=False):
            code &= mask
            earlier[slot] = head[code]
            head[code] = place

    def guesses(self, tail: Sequence[int]) -> Iterator[Guess]:
        """Yield what may follow `tail`, token by token, each if those before were right: the most frequent token after
        the longest match, and of equally frequent ones the newest."""
        with self._lock:
            places, length = self._find(tail)
            tokens, mask = self._tokens, self._size - 1
        while places and tokens is self._tokens:  # otherwise the index was resized
            votes: dict[int, list[int]] = {}
            oldest, end = self._count - self._size, self._count
            for place in places:
                if oldest <= place + 1 < end:
                    votes.setdefault(tokens[place + 1 & mask], []).append(place + 1)
            votes.pop(SEPARATOR, None)
            if not votes:
                return
            token = max(votes, key=lambda token: len(votes[token]))
            yield Guess(token, self.kind, length, len(votes[token]), len(places))
            places, length = votes[token], min(length + 1, MAX_MATCH_TOKENS)

    def _find(self, tail: Sequence[int]) -> tuple[list[int], int]:
        """Return the places with the longest match, newest first, and its length."""
        tokens, mask, newest = self._tokens, self._size - 1, self._count - 1
        oldest = max(self._count - self._size, 0)
        known = tail[-MAX_MATCH_TOKENS:][::-1]
        codes = list(_hashes(known[: ORDERS[-1]]))
        for i in range(len(codes) - 1, -1, -1):
            found: list[int] = []
            longest, place, earlier = ORDERS[i], self._heads[i][codes[i] & mask], self._earlier[i]
            compared = 0
            for _ in range(MAX_VISITED_PLACES):
                if place < oldest or compared == MAX_PLACES:
                    break
                if place < newest:  # a token follows
                    length, most = 0, min(len(known), place - oldest + 1)
                    while length < most and tokens[place - length & mask] == known[length]:
                        length += 1
                    compared += length >= ORDERS[i]
                    if length > longest:
                        found, longest = [], length
                    if length == longest:
                        found.append(place)
                place = earlier[place & mask]
            if found:
                return found, longest
        return [], 0


def _hashes(last: Sequence[int]) -> Iterator[int]:
    """Yield hashes of the last 1, 2, 4, and 8 tokens, which are given newest first."""
    code = 0
    for i, token in enumerate(last, 1):
        code = (code ^ token) * HASH_FACTOR & 0xFFFFFFFF
        code ^= code >> 15
        if i in ORDERS:
            yield code


class RequestText:
    """The text that one request may continue: its own, and that of earlier requests. The answer follows `context`, but
    not `source`, such as the source of a translation."""

    def __init__(
        self, source: Sequence[int], context: Sequence[int], max_length: int, earlier: Sequence[TextIndex] = ()
    ) -> None:
        self._own = TextIndex(2 * (len(source) + max_length) + 2)
        if source:
            self._own.extend([*source, SEPARATOR])
        self._own.extend(context)
        self._indexes = (self._own, *earlier)
        self._tokens = list(context)
        self._num_settled = len(context)
        # For each index: the continuation, and its next guess; `None` if the index was not asked since the last token.
        self._continuations: list[Iterator[Guess] | None] = [None] * len(self._indexes)
        self._next: list[Guess | None] = [None] * len(self._indexes)

    def guesses(self) -> list[Guess]:
        """Return what may come next: at most one guess from each index."""
        tail = self._tokens[-MAX_MATCH_TOKENS:]
        for i, continuation in enumerate(self._continuations):
            if continuation is None:
                continuation = self._continuations[i] = self._indexes[i].guesses(tail)
                self._next[i] = next(continuation, None)
        return [guess for guess in self._next if guess is not None]

    def proposed(self, token: int) -> None:
        """Add a candidate, so that what follows it is looked up next."""
        self._tokens.append(token)
        for i, guess in enumerate(self._next):
            continuation = self._continuations[i]
            follows = guess is not None and guess.token == token and continuation is not None
            self._next[i] = next(continuation, None) if follows else None  # type: ignore[arg-type]
            if self._next[i] is None:
                self._continuations[i] = None

    def settled(self, tokens: Sequence[int]) -> None:
        """End a round: replace the candidates by the emitted tokens."""
        del self._tokens[self._num_settled :]
        self._tokens += tokens
        self._num_settled = len(self._tokens)
        self._own.extend(tokens)
        self._continuations = [None] * len(self._indexes)


class EarlierText:
    """Keep the text of earlier requests in memory. The text of an owner is used for requests of the same owner only.
    The answers of a domain are used for all its requests if the scope is `"domain"`. The least recently used text is
    dropped first."""

    def __init__(self, scope: str, max_bytes: int) -> None:
        self.scope = scope
        self.max_bytes = max_bytes
        self._indexes: OrderedDict[tuple[int, str | None], TextIndex] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        with self._lock:
            return sum(index.nbytes for index in self._indexes.values())

    def _keys(self, owner: str | None, domain: str | None) -> list[tuple[int, str | None]]:
        return {"request": [], "owner": [(OWNER, owner)]}.get(self.scope, [(OWNER, owner), (DOMAIN, domain)])

    def of(self, owner: str | None, domain: str | None) -> list[TextIndex]:
        """Return the text that a request of this owner and domain may use."""
        with self._lock:
            keys = [key for key in self._keys(owner, domain) if key in self._indexes]
            for key in keys:
                self._indexes.move_to_end(key)
            return [self._indexes[key] for key in keys]

    def add(self, owner: str | None, domain: str | None, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Add a request that has ended. Its prompt is kept for its owner only."""
        for key in self._keys(owner, domain):
            with self._lock:
                index = self._indexes.get(key)
                if index is None:
                    index = self._indexes[key] = TextIndex(self.max_bytes // BYTES_PER_TOKEN, key[0])
                self._indexes.move_to_end(key)
            index.extend([*(prompt if key[0] == OWNER else ()), *answer, SEPARATOR])
        with self._lock:
            while len(self._indexes) > 1 and sum(i.nbytes for i in self._indexes.values()) > self.max_bytes:
                self._indexes.popitem(last=False)

    def forget(self, owner: str | None) -> None:
        """Drop the text of an owner. The answers of a domain stay."""
        with self._lock:
            self._indexes.pop((OWNER, owner), None)
