"""Threads of torch: how many it takes, who keeps them, and random numbers that are one thread's own."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

CLEARLY = 0.7  # of one thread's time: what all cores must answer in to be taken
HOPELESS = 4.0  # likewise: what needs no second look, as others keep the cores busy
LONG_SECONDS = 1.0  # with one thread: a large model, which is not timed again
ROUNDS = 5
SOFT = 1  # `omp_pause_soft`: what was set for threads stays
_ATEN = torch.ops.aten
OF_DEFAULT_DTYPE = (_ATEN.empty, _ATEN.zeros, _ATEN.ones, _ATEN.rand, _ATEN.randn)  # what they make, unless told


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_threads(
    model: Any, answer: Callable[[], object], threads: int | None = None, *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, dict[str, float]]:  # fmt: skip
    """
    Set the number of torch's threads: one, unless all cores are clearly faster. Several threads wait for each other
    in each small operation: beside another busy process they take many times as long, one its share alone.

    Args:
        model (`PreTrainedModel`): What is about to serve; unless it is on a CPU, torch's own number stays.
        answer (`Callable[[], object]`): Has it answer a few tokens, to be timed.
        threads (`int`, *optional*): Is taken as it is, as is `OMP_NUM_THREADS` where that is set.
        clock (`Callable[[], float]`, *optional*, defaults to `time.perf_counter`): Seconds.

    Returns:
        `tuple[int, dict[str, float]]`: the number, and the median seconds of both where they were measured.
    """
    most, times = cores(), dict[str, float]()
    if threads is None and (model.device.type != "cpu" or "OMP_NUM_THREADS" in os.environ):
        threads = torch.get_num_threads()
    elif threads is None and most > 1:

        def seconds(number: int) -> float:
            torch.set_num_threads(number)
            began = clock()
            answer()
            return clock() - began

        seconds(1)  # warms up
        pairs = [(seconds(1), seconds(most))]
        is_long, is_hopeless = pairs[0][0] > LONG_SECONDS, pairs[0][1] > HOPELESS * pairs[0][0]
        pairs += [(seconds(1), seconds(most)) for _ in range(0 if is_long or is_hopeless else ROUNDS - 1)]
        one, all_cores = map(statistics.median, zip(*pairs, strict=True))
        threads = most if all_cores < CLEARLY * one else 1
        times = {"1": round(one, 4), str(most): round(all_cores, 4)}
    torch.set_num_threads(threads or 1)
    return threads or 1, times


def release_team() -> None:
    """
    End the team of threads that OpenMP keeps for this one; its next operation begins another, in some 30 us on two
    cores. Each thread that has computed has a team of its own. As soon as all teams together, idle ones too, are more
    threads than there are cores, every team falls asleep between two operations, and small models are served at half
    their speed. So whoever stops computing gives its team back: a request, a part of an update, loading.

    Of GNU's OpenMP (of GCC 9 or newer), which torch comes with on Linux, by `omp_pause_resource_all` (OpenMP 5.0,
    section 3.2.44); nothing happens with another one.
    """
    for pause in _pauses():
        pause(SOFT)


@functools.cache
def _pauses() -> tuple[Callable[[int], int], ...]:
    """`omp_pause_resource_all` of each GNU OpenMP that this process has loaded."""
    pauses = []
    with contextlib.suppress(OSError):  # not on Linux
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
        for path in sorted({line.split(maxsplit=5)[-1] for line in lines if "/libgomp" in line}):
            with contextlib.suppress(OSError, AttributeError):  # no library, or one of before; a file that is gone
                pauses.append(ctypes.CDLL(path, os.RTLD_NOW | os.RTLD_NOLOAD).omp_pause_resource_all)
    return tuple(pauses)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=release_team)  # a child would wait for its team's threads, which are not there


class Seeded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """
    Draw from generators with this seed, and create float32 tensors where no dtype is given.

    Modules made inside are the same in every thread, with every default dtype. Torch's own generators, by which
    requests in other threads sample, stay as they are.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed, self._generators = seed, dict[torch.device, torch.Generator]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, seeded = dict(kwargs or {}), _with_generator(func)
        if func.overloadpacket in OF_DEFAULT_DTYPE:
            kwargs.setdefault("dtype", torch.float32)
        if seeded is not None and kwargs.get("generator") is None:
            func = seeded
            found = (value.device for value in args if isinstance(value, torch.Tensor))
            device = torch.device(next(found, kwargs.get("device") or "cpu"))
            if device not in self._generators:
                self._generators[device] = torch.Generator(device).manual_seed(self.seed)
            kwargs["generator"] = self._generators[device]
        return func(*args, **kwargs)


def _with_generator(func: Any) -> Any:
    """The overload of an operator that draws which takes a generator beside the same arguments, if there is one."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    names = {argument.name for argument in func._schema.arguments} | {"generator"}
    overloads = (getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())
    return next((o for o in (func, *overloads) if {argument.name for argument in o._schema.arguments} == names), None)
