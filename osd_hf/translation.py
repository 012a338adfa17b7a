"""A target's tokens in those of a draft with another tokenizer, by the bytes that both stand for."""

from __future__ import annotations

import functools
import json
import logging
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from transformers.convert_slow_tokenizer import bytes_to_unicode

from osd_hf.errors import DataError, VocabularyMismatchError
from osd_hf.pair import check_tokenizers, differing, find_tokenizer, of_one_size, unwrap, vocab_size_of
from osd_hf.trace import Trace, ids_dtype

__all__ = ["Translated", "Translation", "joined", "tokenizers_of"]

logger = logging.getLogger(__name__)

# One goes before a text that is not the first, so that it gets no space of its own. Rules that cut words put the one
# with spaces, the other one with punctuation.
ANCHORS = ("\n", "\x01")
SAME_AS_TEXT = ("Fuse", "Strip")  # steps of decoders that change no token, or only the space before the first
WIDTH = 64  # entries kept of rows that were whole
MOST_KEPT = 64  # translations of requests
MOST_OPEN = 16  # tokens of a long word that are cut anew as it goes on
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_LONE = re.compile("([\udc80-\udcff]+)")  # how Python reads bytes that are no text


def whole_text(raw: bytes) -> int:
    """How many of these bytes are there without the beginning of a last character."""
    for back in range(1, min(len(raw), 3) + 1):
        byte = raw[-back]
        if byte >= 0xC0:
            length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2
            return len(raw) - back if length > back else len(raw)
        if byte < 0x80:
            break
    return len(raw)


class Encoded(NamedTuple):
    """Tokens of a text, the bytes that each stands for, and the number of the word that each is in: within a word,
    the tokens depend on nothing else."""

    ids: list[int]
    lengths: list[int]
    words: list[int]

    def behind(self, count: int) -> Encoded | None:
        """Those behind so many bytes; `None` where a token has bytes on both sides."""
        ends = [*accumulate(self.lengths, initial=0)]
        at = bisect_right(ends, count) - 1
        return Encoded(self.ids[at:], self.lengths[at:], self.words[at:]) if ends[at] == count else None


class Pieces:
    """
    The tokens of one tokenizer as bytes.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Of the tokenizers library; left as it is.
        size (`int`): Width of its model's logits: tokens beyond are none.

    Raises:
        VocabularyMismatchError: the bytes of a token cannot be told.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if not hasattr(backend, "to_str"):
            raise VocabularyMismatchError(
                f"{type(tokenizer).__name__} is no tokenizer of the tokenizers library, so that its tokens cannot be "
                "compared with another one's. Load it by `AutoTokenizer`, or choose a draft of the target's family."
            )
        written = backend.to_str()
        self._backend = type(backend).from_str(written)  # padding and truncation are the caller's
        self._backend.no_padding()
        self._backend.no_truncation()
        steps, added = list(_steps(json.loads(written)["decoder"])), backend.get_added_tokens_decoder()
        # Whether the first word of a text gets a space that is none of it.
        self.prepends = any(step["type"] in ("Strip", "Metaspace") for step in steps)
        vocab = {i: token for token, i in backend.get_vocab().items() if i < size}
        own = set(tokenizer.all_special_ids)
        self.special = {i: t.content for i, t in added.items() if i < size and (t.special or i in own)}
        self.pieces = [b""] * size  # by id; of ids that are no token's: none
        for i, token in vocab.items():
            self.pieces[i] = added[i].content.encode() if i in added else _spelled(token, steps)
        # The bytes of a character may be a token of their own beside it, which comes second.
        ordinary = sorted((bool(_BYTE.fullmatch(vocab[i])), i) for i in vocab.keys() - self.special.keys())
        self.ids: dict[bytes, int] = {}
        for _, i in ordinary:
            if self.pieces[i]:
                self.ids.setdefault(self.pieces[i], i)
        self._sorted = sorted(self.ids)
        self._in_order = np.array([self.ids[piece] for piece in self._sorted], dtype=np.int64)
        self._longest = max(map(len, self._sorted), default=0)

    def starting_with(self, prefix: bytes) -> NDArray[np.int64]:
        """Ids of the tokens whose bytes begin with these."""
        end = prefix + b"\xff" * self._longest
        return self._in_order[bisect_left(self._sorted, prefix) : bisect_left(self._sorted, end)]

    def within(self, prefix: bytes) -> NDArray[np.int64]:
        """Ids of the tokens whose bytes are the beginning of these, and not all of them."""
        found = (self.ids.get(prefix[:end]) for end in range(1, len(prefix)))
        return np.array([i for i in found if i is not None], dtype=np.int64)

    def encode(self, raw: bytes, *, begins: bool = False) -> Encoded | None:
        """The tokenizer's own tokens of this text, where it `begins` or in the middle; of bytes that are no text, a
        token each. `None` where tokens do not stand for these bytes: a tokenizer may leave out or change characters
        that it does not know."""
        found = Encoded([], [], [])
        for part in _LONE.split(raw.decode(errors="surrogateescape")):
            if _LONE.match(part):
                ids = [self.ids.get(bytes([byte])) for byte in part.encode(errors="surrogateescape")]
                one = None if None in ids else Encoded(ids, [1] * len(ids), [0] * len(ids))  # type: ignore[arg-type]
            elif part:
                one = self._encoded(part, begins=begins and not found.ids)
            else:
                continue
            if one is None:
                return None
            last = found.words[-1] + 1 if found.words else 0
            found.ids.extend(one.ids)
            found.lengths.extend(one.lengths)
            found.words.extend(last + word for word in one.words)
        return found

    def _encoded(self, text: str, *, begins: bool) -> Encoded | None:
        anchors = () if begins else ANCHORS[::-1] if text[0].isspace() else ANCHORS
        for anchor in anchors:
            if (anchored := self._matched(anchor + text)) and (behind := anchored.behind(1)):
                return behind
        return self._matched(text)

    def _matched(self, text: str) -> Encoded | None:
        encoding = self._backend.encode(text, add_special_tokens=False)
        raw, at, lengths = text.encode(), 0, []
        for i in encoding.ids:
            piece = self.pieces[i] if i < len(self.pieces) else b""
            if not raw.startswith(piece, at) and piece.startswith(b" "):
                piece = piece[1:]  # put before a text, or a word, that has none
                if not raw.startswith(piece, at):
                    return None
            elif not piece or not raw.startswith(piece, at):
                return None
            at += len(piece)
            lengths.append(len(piece))
        words = accumulate((0 if word is None else word for word in encoding.word_ids), max)
        return Encoded(encoding.ids, lengths, list(words)) if at == len(raw) else None


def _steps(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The steps of a decoder that say what bytes a token stands for; raises VocabularyMismatchError for others."""
    kind = None if decoder is None else decoder["type"]
    if decoder is not None and kind == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    elif decoder is not None and (
        kind in ("ByteLevel", "ByteFallback", "Metaspace", *SAME_AS_TEXT)
        or (kind == "Replace" and "String" in decoder["pattern"])
    ):
        yield decoder
    else:
        raise VocabularyMismatchError(
            f"A tokenizer with the decoder {kind} does not tell what bytes a token stands for, so that its tokens "
            "cannot be compared with another one's. Choose a draft of the target's family."
        )


@functools.cache
def _byte_of() -> dict[str, int]:
    return {character: byte for byte, character in bytes_to_unicode().items()}


def _spelled(token: str, steps: Sequence[Mapping[str, Any]]) -> bytes:
    """The bytes of a token; none where they cannot be told."""
    for step in steps:
        if step["type"] == "ByteLevel":
            known = _byte_of()
            return bytes(map(known.__getitem__, token)) if all(map(known.__contains__, token)) else b""
        if step["type"] == "ByteFallback" and (byte := _BYTE.fullmatch(token)):
            return bytes.fromhex(byte[1])
        if step["type"] == "Metaspace":
            token = token.replace(step["replacement"], " ")
        elif step["type"] == "Replace":
            token = token.replace(step["pattern"]["String"], step["content"])
    return token.encode()


# --- what a draft reads of the target's tokens ----------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """
    A sequence of the target's tokens as the draft reads it.

    Args:
        ids (`list[int]`): The draft's tokens.
        settled (`int`): So many of them are the same whatever follows.
        tail (`bytes`): What the others stand for, and `cut`, its last bytes: of a character that is not whole yet.
        begins (`bool`): Whether no text stands before the tail.
        has_lost (`bool`): Whether a space was left out of the tail, which the target's tokenizer puts before all text.
    """

    ids: list[int]
    settled: int = 0
    tail: bytes = b""
    cut: bytes = b""
    begins: bool = True
    has_lost: bool = False

    @property
    def num_open(self) -> int:
        """Tokens that may still change, but for the first of all, which nothing stands before."""
        return len(self.ids) - max(self.settled, 1) if self.ids else 0


@dataclass(frozen=True, eq=False)
class Translated:
    """
    A request in the tokens of a draft, greedy and without rounds.

    Args:
        trace (`Trace`):
            Its text as the draft's tokenizer cuts it. Where a token of the answer has the bounds of one of the
            target's, its row is that of the target: each token with the same bytes has its probability, and the rest
            is in the tail. Elsewhere the row is the token itself.
        has_row (`np.ndarray` of shape `(completion,)`, bool): Where the row is the target's.
        first, last (`np.ndarray` of shape `(target's completion,)`, int64):
            The first token that has bytes of each of the target's, and the one behind the last.
    """

    trace: Trace
    has_row: NDArray[np.bool_]
    first: NDArray[np.int64]
    last: NDArray[np.int64]

    def back(self, predicted: NDArray[Any], completion_ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """What a draft that predicts these tokens, one at each position, would have said at those of the target's
        answer: the token of the answer where all that it is made of is right, otherwise -1."""
        wrong = np.concatenate([[0], np.cumsum(predicted != self.trace.completion_ids)])
        is_right = (self.first < self.last) & (wrong[self.first] == wrong[self.last])
        return np.where(is_right, completion_ids, -1)


class Translation:
    """
    Translates what a target says, and requests of it, into the tokens of a draft with another tokenizer, and back.

    Special tokens are those of the same name, or with the same part (beginning, end); others are read as their text.

    Args:
        tokenizer (`PreTrainedTokenizerBase`), assistant_tokenizer (`PreTrainedTokenizerBase`):
            The target's and the draft's, of the tokenizers library; left as they are.
        vocab_size (`int`), assistant_vocab_size (`int`): Widths of the logits of target and draft.

    Raises:
        VocabularyMismatchError: a tokenizer does not tell the bytes of its tokens.
    """

    def __init__(self, tokenizer: Any, assistant_tokenizer: Any, vocab_size: int, assistant_vocab_size: int) -> None:
        self.vocab_size, self.assistant_vocab_size = vocab_size, assistant_vocab_size
        self.ours, self.theirs = Pieces(tokenizer, vocab_size), Pieces(assistant_tokenizer, assistant_vocab_size)
        names = {name: i for i, name in self.theirs.special.items()}
        self.marks = {i: names[name] for i, name in self.ours.special.items() if name in names}
        for part in ("eos_token_id", "bos_token_id"):  # what is both, as GPT-2's, is the end
            ours, theirs = getattr(tokenizer, part), getattr(assistant_tokenizer, part)
            are_free = ours not in self.marks and theirs not in self.marks.values()
            if are_free and ours in self.ours.special and theirs in self.theirs.special:
                self.marks[ours] = theirs
        self.marks_back = {theirs: ours for ours, theirs in self.marks.items()}
        self._silent = {tokenizer.pad_token_id, tokenizer.bos_token_id} - self.marks.keys()
        self.same = np.full(vocab_size, -1, dtype=np.int64)  # by id: the draft's token with the same bytes
        for piece, i in self.ours.ids.items():
            self.same[i] = self.theirs.ids.get(piece, -1)
        for i, other in self.marks.items():
            self.same[i] = other
        self._bos = assistant_tokenizer.bos_token_id
        begun = assistant_tokenizer("")["input_ids"][:1]
        self._opening = begun if begun == [self._bos] else []
        self._translated = functools.lru_cache(MOST_KEPT)(self._translate)

    @classmethod
    def of(cls, target: Any, draft: Any, tokenizer: Any = None, assistant_tokenizer: Any = None) -> Self | None:
        """
        Between two models, whose tokenizers are found where they came from; `None` where both have one vocabulary.

        Raises:
            VocabularyMismatchError: a tokenizer is not known, or does not tell the bytes of its tokens; or the models
                are encoder-decoders.
        """
        ours, theirs = tokenizers_of(tokenizer, assistant_tokenizer, target, draft)
        if theirs is None:
            return None
        if target.config.is_encoder_decoder:
            raise VocabularyMismatchError(
                "The tokenizers of target and draft differ, which only decoder-only models may have, got "
                "encoder-decoders. Choose a draft of the target's family."
            )
        made = cls(ours, theirs, vocab_size_of(target), vocab_size_of(draft))
        logger.warning(
            "The draft has a tokenizer of its own: it reads the target's text in its own tokens, of which %d are the "
            "same as one of the target's %d, and what it says is put into the target's.",
            (made.same >= 0).sum(), len(made.ours.ids) + len(made.ours.special),
        )  # fmt: skip
        return made

    def piece(self, token: int) -> bytes:
        """The bytes of a token of the target; none of one that is no text."""
        return b"" if token in self._silent or token >= self.vocab_size else self.ours.pieces[token]

    def read(self, ids: Sequence[int], before: Reading | None = None) -> Reading | None:
        """These tokens of the target as the draft reads them, after what it has read before; `None` where it cannot
        spell them."""
        if before is None:
            opens = not ids or self.marks.get(ids[0]) not in self._opening
            before = Reading(list(self._opening) if opens else [])
            before = replace(before, settled=len(before.ids))
        for is_mark, group in groupby(ids, self.marks.__contains__):
            if is_mark:
                known = [*before.ids, *(self.marks[token] for token in group)]
                begins = before.begins and not before.tail and known[-1] == self._bos
                before = Reading(known, len(known), begins=begins)
                continue
            tail = before.tail + b"".join(map(self.piece, group))
            has_lost = before.has_lost
            if before.begins and not before.tail and self.ours.prepends and not has_lost:
                has_lost = tail.startswith(b" ")
                tail = tail.removeprefix(b" ")
            end = whole_text(tail)
            encoded = self.theirs.encode(tail[:end], begins=before.begins)
            if encoded is None:
                return None
            # The tokens of the last word may be others once more of it is there.
            last = bisect_left(encoded.words, encoded.words[-1]) if encoded.words else 0
            last = max(last, len(encoded.ids) - MOST_OPEN)
            length = sum(encoded.lengths[:last])
            before = Reading(
                before.ids[: before.settled] + encoded.ids, before.settled + last, tail[length:], tail[end:],
                before.begins and last == 0, has_lost,
            )  # fmt: skip
        return before

    def __call__(self, trace: Trace) -> Translated:
        """A request in the draft's tokens; raises DataError where its text cannot be spelled in them."""
        return self._translated(trace)

    def _translate(self, trace: Trace) -> Translated:
        prompt, ids, lengths = self.read(trace.prompt_ids.tolist()), list[int](), list[int]()
        answer: list[int] = trace.completion_ids.tolist()
        encoded: Encoded | None = None
        for is_mark, group in groupby(answer, self.marks.__contains__):
            tokens = list(group)
            if is_mark:
                encoded = Encoded([self.marks[t] for t in tokens], [1] * len(tokens), [])
            else:
                encoded = self.theirs.encode(b"".join(map(self.piece, tokens)))
            if encoded is None:
                break
            ids += encoded.ids
            lengths += encoded.lengths
        if prompt is None or not prompt.ids or encoded is None or not ids:
            raise DataError("A request has text that the draft's tokenizer cannot spell. Leave it out.")
        ends = np.cumsum([1 if t in self.marks else len(self.piece(t)) for t in answer])
        their_ends, completion = np.cumsum(lengths), np.array(ids, dtype=np.int32)
        starts, their_starts = np.append(0, ends[:-1]), their_ends - lengths
        first, last = np.searchsorted(their_ends, starts, "right"), np.searchsorted(their_starts, ends, "left")
        last = np.where(ends > starts, last, first)
        at = np.minimum(np.searchsorted(ends, their_ends), len(ends) - 1)  # whose row it may have
        aligned = (
            (ends[at] == their_ends)
            & (starts[at] == their_starts)
            & (self.same[trace.completion_ids[at]] == completion)
        )
        rows, has_row = self._rows(trace, at, aligned, completion)
        translated = replace(
            trace, prompt_ids=np.array(prompt.ids, dtype=np.int32), completion_ids=completion, rounds=(), sampling={},
            vocab_size=self.assistant_vocab_size, **rows,
        )  # fmt: skip
        return Translated(translated, has_row, first, last)

    def _rows(
        self, trace: Trace, at: NDArray[np.int64], aligned: NDArray[np.bool_], completion: NDArray[np.int32]
    ) -> tuple[dict[str, Any], NDArray[np.bool_]]:
        """The target's rows `at` these positions over the draft's tokens, where they are `aligned`; elsewhere the
        token itself. All have one width, and name no token twice."""
        count, dtype = len(completion), ids_dtype(self.assistant_vocab_size)
        if not trace.num_kept:
            nothing, none = np.zeros((count, 0), np.float16), np.zeros(count, np.float32)
            empty = {"top_logits": nothing, "top_ids": nothing.astype(dtype), "tail_logprob": none}
            return empty, np.zeros(count, bool)
        width = trace.num_kept if trace.top_ids.shape[1] else WIDTH
        width = min(width, self.assistant_vocab_size)
        logprobs = trace.kept_logprobs()[at].astype(np.float64)
        kept_ids = trace.top_ids[at].astype(np.int64) if trace.top_ids.shape[1] else np.arange(self.vocab_size)[None]
        theirs = np.broadcast_to(self.same[kept_ids], logprobs.shape)
        logprobs = np.where((theirs >= 0) & aligned[:, None], logprobs, -np.inf)
        order = np.argsort(-logprobs, axis=1, kind="stable")[:, :width]
        kept, top = (np.take_along_axis(a, order, axis=1) for a in (logprobs, theirs))
        if (short := width - kept.shape[1]) > 0:  # the target has fewer tokens
            kept, top = np.pad(kept, ((0, 0), (0, short)), constant_values=-np.inf), np.pad(top, ((0, 0), (0, short)))
        has_row = np.isfinite(kept[:, 0])
        kept[~has_row, 0], top[~has_row, 0] = 0.0, completion[~has_row]
        gaps = ~np.isfinite(kept)
        for row in np.flatnonzero(gaps.any(axis=1)):  # something has to stand where nothing is likely
            others = np.setdiff1d(np.arange(min(2 * width, self.assistant_vocab_size)), top[row, ~gaps[row]])
            top[row, gaps[row]] = others[: gaps[row].sum()]
        with np.errstate(divide="ignore"):
            tail = np.log1p(-np.minimum(np.exp(kept).sum(axis=1), 1.0))
        kept -= kept.max(axis=1, keepdims=True)
        logits, tail = kept.astype(np.float16), tail.astype(np.float32)
        return {"top_logits": logits, "top_ids": top.astype(dtype), "tail_logprob": tail}, has_row


def tokenizers_of(tokenizer: Any, assistant_tokenizer: Any, target: Any, draft: Any) -> tuple[Any, Any]:
    """
    The target's tokenizer (`None` where it is not known) and, where its vocabulary differs in more than added tokens,
    the draft's own: those given or, by default, those found where the models came from. With the target's alone, what
    is not known to differ is taken for the same.

    Raises:
        VocabularyMismatchError: one that is given is not the one found; the draft's is given, and the target's is
            neither given nor found.
    """
    sides = []
    for given, model in ((tokenizer, target), (assistant_tokenizer, draft)):
        found = find_tokenizer(model)
        if given is not None and found is not None:
            check_tokenizers(given, found)
        sides.append(found if given is None else given)
    ours, theirs = sides
    if ours is None and assistant_tokenizer is not None:
        raise VocabularyMismatchError(
            "`assistant_tokenizer` was given, the draft's, but the target's was not, nor was it found where the "
            "target came from. Pass `tokenizer=` as well."
        )
    if ours is None or theirs is None or not differing(ours, theirs):
        return theirs if ours is None else ours, None
    return ours, theirs


def joined(
    target: Any, draft: Any, tokenizer: Any, assistant_tokenizer: Any
) -> tuple[Any, Any, Any, Translation | None]:
    """The draft as it serves this unwrapped target, the tokenizers of both, as far as they are known, and the
    translation between them, `None` where they share one; raises VocabularyMismatchError, as [`Translation`] and
    [`align_vocab`] do."""
    ours, own = tokenizers_of(tokenizer, assistant_tokenizer, target, unwrap(draft))
    if own is None:
        return of_one_size(draft, target, tokenizer), ours, ours, None
    return draft, ours, own, Translation.of(target, unwrap(draft), ours, own)
