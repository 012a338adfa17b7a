"""Bytes of tensors that this process holds, to be counted before and after."""

from __future__ import annotations

import gc

import torch


def held_bytes() -> int:
    """Bytes of the memory under all tensors that are reached, gradients included; what several lie in counts once."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    found += [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]
    storages = [tensor.untyped_storage() for tensor in found if tensor.device.type != "meta"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
