"""Candidates from past text: what followed the last tokens where they stood before."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["EarlierText", "Guess", "RequestText", "TextIndex", "TokenIndex"]

ORDERS = (1, 2, 4, 8)  # lengths of the endings that are looked up
LONGEST = 32  # tokens of a match; longer ones are as good
CANDIDATES = 32  # newest places with the same ending that are looked at
MOST_LOOKED_AT = 256  # places, those of other endings with the same hash included
SEPARATOR = -1  # between texts that do not follow each other
AHEAD = 1024  # tokens of an answer that memory is taken for at once
BYTES_PER_TOKEN = 4 + len(ORDERS) * (4 + 4)
MANY = 64  # tokens from which on they are indexed all at once
HASH = 0x9E3779B1
MOST_TOKENS = 1 << 30  # after which an index begins anew
LENGTHS = (2, 3, 4, 6, 10, 16, 32)  # matches between two of these are alike


class Guess(NamedTuple):
    """A token that may come next, and what speaks for it: the kind of text it stands in (0 the request's own, 1 that
    of earlier ones of its owner, 2 of its domain), how many tokens before it are the same, and at how many of the
    places with such a match it is what follows."""

    token: int
    kind: int
    length: int
    votes: int
    places: int

    @property
    def situation(self) -> tuple[int, int, int]:
        """What guesses have in common that are likely right equally often."""
        if self.places == 1:
            agreement = 1
        elif self.votes == self.places:
            agreement = 3
        else:
            agreement = 2 if 2 * self.votes > self.places else 0
        return self.kind, bisect_right(LENGTHS, self.length), agreement


class TokenIndex:
    """
    Tokens in order, each with the last place before it that follows the same 1, 2, 4 and 8 tokens: hash chains, as
    compressors search the text behind them by. It takes 36 bytes a token; beyond its capacity, the oldest tokens give
    way. Found places are compared token by token, so that nothing is proposed that does not stand in the text.

    Args:
        capacity (`int`): Most tokens; the next smaller power of two is held.
        kind (`int`, *optional*, defaults to 0): Of its guesses.
        expected (`int`, *optional*, defaults to 256): Tokens that memory is taken for at first.
    """

    def __init__(self, capacity: int, kind: int = 0, expected: int = 256) -> None:
        self.kind = kind
        self._capacity = 1 << (max(capacity, 1).bit_length() - 1)
        self._lock = threading.Lock()
        self._clear(min(1 << (max(expected, 1) - 1).bit_length(), self._capacity))

    def _clear(self, size: int) -> None:
        self._size, self._count = size, 0
        self._tokens = array("i", bytes(4 * size))  # another one at each change of size
        nothing = array("i", [-1]) * size
        self._heads = [nothing[:] for _ in ORDERS]  # hash -> the newest place
        self._earlier = [nothing[:] for _ in ORDERS]  # place -> the one before it with the same hash
        self._last: list[int] = []  # tokens since the last separator, newest first

    def __len__(self) -> int:
        """Tokens held."""
        return min(self._count, self._size)

    @property
    def nbytes(self) -> int:
        """Bytes taken."""
        return self._size * BYTES_PER_TOKEN

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens that follow those before."""
        with self._lock:
            self._extend(tokens)

    def separate(self) -> None:
        """What is added from now on does not follow what is there."""
        with self._lock:
            self._extend([SEPARATOR])

    def _extend(self, tokens: Sequence[int]) -> None:
        while len(tokens):
            if self._count >= MOST_TOKENS:
                self._clear(self._size)
            if self._count + len(tokens) > self._size < self._capacity:
                held, wanted = self._tokens[: self._count], self._count + len(tokens)
                self._clear(min(1 << (wanted - 1).bit_length(), self._capacity))
                self._extend(held)
            part, tokens = tokens[: self._size], tokens[self._size :]
            self._append_all(part)

    def _append_all(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        place, mask = self._count, self._size - 1
        slot = place & mask
        self._tokens[slot] = token
        self._count += 1
        last = self._last
        if token == SEPARATOR:
            last.clear()
            return
        last.insert(0, token)
        del last[ORDERS[-1] :]
        for head, earlier, code in zip(self._heads, self._earlier, _codes(last), strict=False):
            code &= mask
            earlier[slot] = head[code]
            head[code] = place

    def guesses(self, tail: Sequence[int]) -> Iterator[Guess]:
        """What may follow `tail`, token by token, each on condition that those before were right: the most frequent
        continuation, of equal ones the newest, of the places with the longest match."""
        with self._lock:
            places, length = self._find(tail)
            tokens, mask = self._tokens, self._size - 1
        while places and tokens is self._tokens:  # otherwise places are others now
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
            places, length = votes[token], min(length + 1, LONGEST)

    def _find(self, tail: Sequence[int]) -> tuple[list[int], int]:
        """The places with the longest match, newest first, and its length."""
        tokens, mask, newest = self._tokens, self._size - 1, self._count - 1
        oldest = max(self._count - self._size, 0)
        known = tail[-LONGEST:][::-1]
        codes = list(_codes(known[: ORDERS[-1]]))
        for i in range(len(codes) - 1, -1, -1):
            found: list[int] = []
            longest, place, earlier = ORDERS[i], self._heads[i][codes[i] & mask], self._earlier[i]
            candidates = 0
            for _ in range(MOST_LOOKED_AT):
                if place < oldest or candidates == CANDIDATES:
                    break
                if place < newest:  # something follows
                    length, most = 0, min(len(known), place - oldest + 1)
                    while length < most and tokens[place - length & mask] == known[length]:
                        length += 1
                    candidates += length >= ORDERS[i]
                    if length > longest:
                        found, longest = [], length
                    if length == longest:
                        found.append(place)
                place = earlier[place & mask]
            if found:
                return found, longest
        return [], 0


def _codes(last: Sequence[int]) -> Iterator[int]:
    """Hashes of the endings of 1, 2, 4 and 8 tokens, as far as there are so many, from tokens newest first."""
    code = 0
    for i, token in enumerate(last, 1):
        code = (code ^ token) * HASH & 0xFFFFFFFF
        code ^= code >> 15
        if i in ORDERS:
            yield code


class TextIndex(TokenIndex):
    """The same, which indexes many tokens at once: a prompt may be long."""

    def _append_all(self, tokens: Sequence[int]) -> None:
        if len(tokens) < MANY:
            super()._append_all(tokens)
            return
        known, mask = self._last[::-1], self._size - 1
        held = np.array([*known, *tokens], dtype=np.int64)
        index = np.arange(len(held))
        places, is_new = self._count - len(known) + index, index >= len(known)
        is_end = held == SEPARATOR
        since = index - np.maximum.accumulate(np.where(is_end, index, -1)) - 1  # tokens before it in its text
        np.frombuffer(self._tokens, np.int32)[places[is_new] & mask] = held[is_new]
        code = np.zeros(len(held), np.int64)
        for i in range(min(ORDERS[-1], len(held))):
            code[i:] = (code[i:] ^ held[: len(held) - i]) * HASH & 0xFFFFFFFF
            code[i:] ^= code[i:] >> 15
            if i + 1 not in ORDERS:
                continue
            chain = ORDERS.index(i + 1)
            heads, earlier = (np.frombuffer(a[chain], np.int32) for a in (self._heads, self._earlier))
            at = np.flatnonzero(is_new & ~is_end & (since >= i))
            at = at[np.argsort(code[at] & mask, kind="stable")]
            codes, theirs = code[at] & mask, places[at]
            is_first = np.append(True, codes[1:] != codes[:-1])[: len(codes)]
            earlier[theirs & mask] = np.where(is_first, heads[codes], np.roll(theirs, 1))
            is_last = np.append(is_first[1:], True)[: len(codes)]
            heads[codes[is_last]] = theirs[is_last]
        self._count += len(tokens)
        self._last = held[len(held) - 1 - int(since[-1]) :][::-1][: ORDERS[-1]].tolist()


class RequestText:
    """
    What one request can be continued by: its own text as it comes, and that of earlier requests.

    Args:
        own (`type[TokenIndex]`): What its own text is kept in.
        before (`Sequence[int]`): Text of the request that its answer does not follow: the source of a translation.
        context (`Sequence[int]`): The tokens that the answer follows.
        most (`int`): Tokens that the request may come to, `before` included.
        earlier (`Sequence[TokenIndex]`): Of earlier requests.
    """

    def __init__(
        self,
        own: type[TokenIndex],
        before: Sequence[int],
        context: Sequence[int],
        most: int,
        earlier: Sequence[TokenIndex] = (),
    ) -> None:
        known = len(before) + len(context)
        self._own = own(2 * (len(before) + most) + 2, expected=known + min(most, AHEAD) + 2)
        if before:
            self._own.extend(before)
            self._own.separate()
        self._own.extend(context)
        self._indexes = (self._own, *earlier)
        self._tokens, self._settled = list(context), len(context)
        # By index: what it says of the next tokens, and the first of that; `None` where it has to be asked.
        self._runs: list[Iterator[Guess] | None] = [None] * len(self._indexes)
        self._next: list[Guess | None] = [None] * len(self._indexes)

    def guesses(self) -> list[Guess]:
        """What may come next; from each index at most one guess."""
        tail: list[int] | None = None
        for i, run in enumerate(self._runs):
            if run is None:
                tail = tail or self._tokens[-LONGEST:]
                run = self._runs[i] = self._indexes[i].guesses(tail)
                self._next[i] = next(run, None)
        return [guess for guess in self._next if guess is not None]

    def proposed(self, token: int) -> None:
        """A token has been proposed; what may come after it is asked for next."""
        self._tokens.append(token)
        for i, guess in enumerate(self._next):
            run = self._runs[i]
            follows = None if guess is None or run is None or guess.token != token else next(run, None)
            self._next[i], self._runs[i] = follows, run if follows is not None else None

    def settled(self, tokens: Sequence[int]) -> None:
        """The round has ended, and has emitted these tokens."""
        del self._tokens[self._settled :]
        self._tokens += tokens
        self._settled = len(self._tokens)
        self._own.extend(tokens)
        self._runs = [None] * len(self._indexes)


EARLIER_TEXT_BYTES = 1 << 26  # of all text and its index; 36 bytes a token


class EarlierText:
    """
    The text of earlier requests, as token ids in memory. That of an owner is looked up for requests of the same owner
    alone; what a domain was answered, for all requests of the domain, if that is asked for. The longest unused goes
    where more is held than allowed.

    Args:
        scope (`str`): `"request"` keeps nothing; `"owner"`; `"domain"`, as well as the owner's.
        max_bytes (`int`): Most bytes of all together.
    """

    def __init__(self, scope: str, max_bytes: int) -> None:
        self.scope, self.max_bytes = scope, max_bytes
        self._indexes: OrderedDict[tuple[int, Any], TextIndex] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes taken."""
        with self._lock:
            return sum(index.nbytes for index in self._indexes.values())

    def _keys(self, owner: str | None, domain: str | None) -> list[tuple[int, Any]]:
        return {"request": [], "owner": [(1, owner)]}.get(self.scope, [(1, owner), (2, domain)])

    def of(self, owner: str | None, domain: str | None) -> list[TextIndex]:
        """What a request of this owner and domain may look up."""
        with self._lock:
            keys = [key for key in self._keys(owner, domain) if key in self._indexes]
            for key in keys:
                self._indexes.move_to_end(key)
            return [self._indexes[key] for key in keys]

    def add(self, owner: str | None, domain: str | None, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """A request has ended. The prompt is for its owner alone."""
        for key in self._keys(owner, domain):
            with self._lock:
                index = self._indexes.get(key)
                if index is None:
                    index = self._indexes[key] = TextIndex(self.max_bytes // BYTES_PER_TOKEN, key[0])
                self._indexes.move_to_end(key)
            if key[0] == 1:
                index.extend(prompt)
                # An encoder-decoder's answer does not follow, but nothing is lost by taking it to.
            index.extend(answer)
            index.separate()
        with self._lock:
            while len(self._indexes) > 1 and sum(i.nbytes for i in self._indexes.values()) > self.max_bytes:
                self._indexes.popitem(last=False)

    def forget(self, owner: str | None) -> None:
        """Let go of what an owner's requests were; what a domain was answered stays."""
        with self._lock:
            self._indexes.pop((1, owner), None)
