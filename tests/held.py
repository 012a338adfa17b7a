"""Bytes of tensors that this process holds, to be counted before and after."""

from __future__ import annotations

import gc

import torch
from torch._subclasses.fake_tensor import FakeTensor


def held_bytes() -> int:
    """Bytes of the memory under all tensors that are reached, gradients included; what several lie in counts once.
    Garbage counts until it is collected."""
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    found += [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]
    is_empty = [tensor.device.type == "meta" or isinstance(tensor, FakeTensor) for tensor in found]
    storages = [tensor.untyped_storage() for tensor, empty in zip(found, is_empty, strict=True) if not empty]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
