"""What a forked child makes anew: a fork copies locks that threads hold, but not the threads."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["in_child", "renewing"]

T = TypeVar("T")

_living: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def in_child(owner: T, renew: Callable[[T], None]) -> None:
    """Call `renew` with `owner`, which is held weakly, in each child that this process forks, before anything else
    there. The child has one thread; what others were in the middle of stays half done."""
    _living[owner] = renew


def renewing(**kinds: Callable[[], Any]) -> Callable[[Any], None]:
    """What makes these attributes anew, such as `_lock=threading.Lock`. The old objects stay as they are, so that a
    block that the forking thread is in ends as it began."""

    def renew(owner: Any) -> None:
        for name, kind in kinds.items():
            setattr(owner, name, kind())

    return renew


def _renew_all() -> None:
    for owner, renew in list(_living.items()):
        renew(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
