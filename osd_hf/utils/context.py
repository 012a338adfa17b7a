"""Settings of the calling thread: default device, autocast, threads, and random numbers. Copies to a device."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CLEARLY_FASTER = 0.7  # of the seconds with one thread: below, all cores are used
MAX_RETIMED_SECONDS = 1.0  # larger models are timed once
TIMING_ROUNDS = 5
_ATEN = torch.ops.aten
OF_DEFAULT_DTYPE = (_ATEN.empty, _ATEN.zeros, _ATEN.ones, _ATEN.rand, _ATEN.randn)


@contextmanager
def neutral_context() -> Iterator[None]:
    """Disable the caller's autocast, and create tensors on the CPU by default, for computations of this package (not
    for the target's forwards, processors, and criteria). The default dtype, which all threads share, does not change:
    code inside names the dtype of each tensor that it creates."""
    accelerator = torch.accelerator.current_accelerator()
    device_types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    with ExitStack() as stack:
        for device_type in device_types:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        if torch.get_default_device() != torch.device("cpu"):
            stack.enter_context(torch.device("cpu"))
        yield


def to_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """Return a tensor of these numbers on a device. On CUDA, the calling thread does not wait for the device."""
    is_cuda = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=is_cuda).to(device, non_blocking=is_cuda)


def choose_threads(
    model: PreTrainedModel,
    answer: Callable[[], object],
    threads: int | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, dict[str, float]]:
    """Set the number of torch's threads to 1, unless all cores generate an `answer` of a few tokens clearly faster:
    several threads are slow if another process is busy. `threads` and `OMP_NUM_THREADS` set the number without timing;
    for models on an accelerator it stays. Returns the number, and the median seconds of both numbers if timed."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    times: dict[str, float] = {}
    if threads is None and (model.device.type != "cpu" or "OMP_NUM_THREADS" in os.environ):
        threads = torch.get_num_threads()
    elif threads is None and num_cores > 1:

        def seconds(number: int) -> float:
            torch.set_num_threads(number)
            started = clock()
            answer()
            return clock() - started

        rounds = 1 if seconds(1) > MAX_RETIMED_SECONDS else TIMING_ROUNDS  # the first answer warms up
        pairs = [(seconds(1), seconds(num_cores)) for _ in range(rounds)]
        one, all_cores = map(statistics.median, zip(*pairs, strict=True))
        threads = num_cores if all_cores < CLEARLY_FASTER * one else 1
        times = {"1": round(one, 4), str(num_cores): round(all_cores, 4)}
    torch.set_num_threads(threads or 1)
    return threads or 1, times


class Seeded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draw random numbers from new generators with this seed, and create float32 tensors by default. Torch's own
    generators, which sampled requests in other threads use, stay unchanged."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.overloadpacket in OF_DEFAULT_DTYPE:
            kwargs.setdefault("dtype", torch.float32)
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            if all(argument.name != "generator" for argument in func._schema.arguments):
                name = func._overloadname.replace("default", "")  # such as `randn.default` and `randn.generator`
                func = getattr(func.overloadpacket, f"{name}_generator".lstrip("_"))
            devices = (value.device for value in args if isinstance(value, torch.Tensor))
            device = torch.device(next(devices, kwargs.get("device") or "cpu"))
            if device not in self._generators:
                self._generators[device] = torch.Generator(device).manual_seed(self.seed)
            kwargs["generator"] = self._generators[device]
        return func(*args, **kwargs)
