"""Turns: long work lets others go first between any two of its small pieces, and forks happen there alone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from osd_hf.utils.disk import in_child

__all__ = [
    "between", "breathe", "clock", "computing", "give_way", "give_way_at", "gives_way", "giving_way", "held_by_forks",
    "in_pieces",
]  # fmt: skip

PIECE = 1 << 23  # elements of weights that are gone through without a stop, about what one layer has
PATIENCE = 10.0  # seconds: a fork waits so long at most for others to come to a place where they hold nothing


class _Forks:
    """Which threads may be inside a product: MKL locks its memory there, for good in a child forked meanwhile."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.Lock())
        self.depth: dict[int, int] = {}  # of the blocks that a thread is in
        self.forking: int | None = None  # the thread, while it waits
        self.turn = threading.Lock()  # its own, until it has forked
        self.held: list[threading.RLock] = []  # taken by a fork once nobody is inside

    @contextmanager
    def computing(self) -> Iterator[None]:
        me = threading.get_ident()
        self._enter(me, 1)
        try:
            yield
        finally:
            self._leave(me, 1)

    @contextmanager
    def resting(self) -> Iterator[None]:
        me = threading.get_ident()
        depth = self.depth.get(me, 0)
        self._leave(me, depth)
        try:
            yield
        finally:
            self._enter(me, depth)

    def _enter(self, me: int, times: int) -> None:
        if times:
            with self.changed:
                while self.forking not in (None, me) and me not in self.depth:
                    self.changed.wait()
                self.depth[me] = self.depth.get(me, 0) + times

    def _leave(self, me: int, times: int) -> None:
        if times:
            with self.changed:
                left = self.depth.get(me, 0) - times
                if left > 0:
                    self.depth[me] = left
                else:
                    self.depth.pop(me, None)
                if self.forking is not None:
                    self.changed.notify_all()

    def before(self) -> None:
        self.turn.acquire()
        self.changed.acquire()
        self.forking = threading.get_ident()
        self.changed.wait_for(lambda: not (self.depth.keys() - {self.forking}), PATIENCE)
        for lock in self.held:
            lock.acquire()

    def in_parent(self) -> None:
        for lock in reversed(self.held):
            lock.release()
        self.forking = None
        self.changed.notify_all()
        self.changed.release()
        self.turn.release()

    def in_child(self) -> None:
        for lock in reversed(self.held):
            lock.release()
        me = threading.get_ident()
        self.changed, self.turn, self.forking = threading.Condition(threading.Lock()), threading.Lock(), None
        self.depth = {me: self.depth[me]} if me in self.depth else {}


_forks = _Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_forks.before, after_in_parent=_forks.in_parent, after_in_child=_forks.in_child)


def computing() -> AbstractContextManager[None]:
    """Entered around forwards and backwards: a fork by another thread waits, for some seconds at most, until this one
    is outside, or calls [`breathe`], or gives way."""
    return _forks.computing()


def held_by_forks(lock: threading.RLock) -> None:
    """Let forks take this lock, and their children have it free. They take it after they have waited for those who
    compute, who may need it to get on: a lock with a handler of its own would be taken before."""
    _forks.held.append(lock)


def breathe() -> None:
    """Let a fork happen that another thread waits with: called inside `computing`, between two forwards."""
    if _forks.forking not in (None, threading.get_ident()):
        with _forks.resting():
            pass


class _Turn:
    """Lets others go first, and knows how long that has taken."""

    def __init__(self, let_in: Callable[[], object]) -> None:
        self.let_in = let_in
        self.thread = threading.get_ident()
        self.waited = 0.0  # seconds

    def __call__(self) -> None:
        started = time.perf_counter()
        with _forks.resting():
            self.let_in()
        self.waited += time.perf_counter() - started


_TURN: ContextVar[_Turn | None] = ContextVar("osd_hf_turn", default=None)


@contextmanager
def giving_way(let_in: Callable[[], object] | None) -> Iterator[None]:
    """What this thread does inside calls `let_in` between its pieces, which may take its time; with `None`: nothing,
    as where others would wait for the work to end."""
    token = _TURN.set(None if let_in is None else _Turn(let_in))
    try:
        yield
    finally:
        _TURN.reset(token)


def gives_way() -> bool:
    """Whether the work of this thread is one that lets others go first."""
    return _TURN.get() is not None


def give_way() -> None:
    """Let others go first, if this thread is to: called between two pieces, where nothing is held that they need."""
    turn = _TURN.get()
    if turn is not None:
        turn()


def give_way_at(states: torch.Tensor) -> None:
    """Let others go first now, and once more in the backward, when the gradient of these states is there: on a CPU,
    where a backward runs in the thread that asks for it."""
    turn = _TURN.get()
    if turn is not None:
        turn()
        if states.requires_grad:
            # Accelerators have one thread each for all backwards: others would wait for the one that waits for them.
            states.register_hook(  # type: ignore[no-untyped-call]
                lambda _: turn() if threading.get_ident() == turn.thread else None
            )


@contextmanager
def between(layers: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Forwards inside and, on a CPU, their backwards stop before each of these layers."""
    with ExitStack() as stack:
        in_child(stack, ExitStack.close)  # a forked child has no thread that would
        for layer in layers if gives_way() else ():
            stack.callback(layer.register_forward_pre_hook(_at_layer, with_kwargs=True).remove)
        yield


def _at_layer(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    found = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.is_floating_point())
    if (states := next(found, None)) is None:
        give_way()
    else:
        give_way_at(states)


def in_pieces(*families: Sequence[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], ...]]:
    """Tensors of several families, those at one place of the same shape: as many at once as have so many elements
    that going through them takes no longer than a layer, of a larger one some rows. Gives way before each piece."""
    piece: list[tuple[torch.Tensor, ...]] = []
    size = 0
    for alike in zip(*families, strict=True):
        first, parts = alike[0], [alike]
        if first.numel() > PIECE:
            rows = max(PIECE * len(first) // first.numel(), 1)
            parts = list(zip(*(tensor.split(rows) for tensor in alike), strict=True))
        for part in parts:
            if piece and (size + part[0].numel() > PIECE or part[0].device != piece[0][0].device):
                give_way()
                yield tuple(map(list, zip(*piece, strict=True)))
                piece, size = [], 0
            piece.append(part)
            size += part[0].numel()
    if piece:
        give_way()
        yield tuple(map(list, zip(*piece, strict=True)))


def clock() -> float:
    """Seconds, as `time.perf_counter` counts them, without those in which the work of this thread has given way."""
    turn = _TURN.get()
    return time.perf_counter() - (0.0 if turn is None else turn.waited)
