"""
A worker extension for vLLM (0.32) that loads new weights into its draft, for vLLM's own environment.

    pip install --no-deps osd-hf                # in vLLM's environment; only this file is imported
    VLLM_SERVER_DEV_MODE=1 vllm serve TARGET --worker-extension-cls osd_hf.engines.vllm_reload.DraftReload \\
        --speculative-config '{"method": "draft_model", "model": "static", "num_speculative_tokens": 5}'

`osd-hf learn --deploy reload=URL` calls it. The development mode opens endpoints that strangers must not reach.
Requests continue during a load, because answers are the target's own with any draft. Tested on a CPU; on GPUs it uses
the same functions of vLLM.

This module must not import anything else of this package, because only vLLM's dependencies are installed there.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

__all__ = ["DraftReload", "Weights", "weights_digest"]

NUM_SUMMED = 1 << 16  # values of a weight that are compared before and after a load
NUM_PROBES = 4  # random vectors to test an output head
TOLERANCE = 0.05  # relative to the largest logit, for half precisions


class Weights:
    """The weights in the safetensors files of a folder, to be iterated once, and their digest: SHA-256 over names,
    dtypes, shapes and bytes in the order of names, which does not depend on how the weights are split into files.
    Weights of the modules in `except_for`, by their own names, are not iterated, but count for the digest. Raises
    FileNotFoundError for a folder without weights."""

    def __init__(self, folder: Path, except_for: Collection[str] = ()) -> None:
        self._except_for = except_for
        self._files = sorted(folder.glob("*.safetensors"))
        if not self._files:
            raise FileNotFoundError(f"{folder} holds no weights in the format of safetensors")
        self._found: dict[str, bytes] = {}

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        import torch

        for name, read in self._names():
            tensor = read(name)
            own = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            own.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
            self._found[name] = own.digest()
            if module_of(name) not in self._except_for:
                yield name, tensor

    def left_out(self) -> Iterator[tuple[str, Any]]:
        """Return the weights that are not iterated, with their names."""
        return ((name, read(name)) for name, read in self._names() if module_of(name) in self._except_for)

    def _names(self) -> Iterator[tuple[str, Callable[[str], Any]]]:
        from safetensors import safe_open

        for path in self._files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    yield name, file.get_tensor

    @property
    def digest(self) -> str:
        """Digest of the weights that were iterated, in 64 hexadecimal digits."""
        return hashlib.sha256(b"".join(own for _, own in sorted(self._found.items()))).hexdigest()


def weights_digest(folder: Path) -> str:
    """Return the digest of the weights in a folder (see [`Weights`]); raises FileNotFoundError."""
    weights = Weights(folder)
    for _ in weights:
        pass
    return weights.digest


class DraftReload:
    """Adds `load_draft` to vLLM's worker, by `--worker-extension-cls`."""

    _draft_digest: str | None = None  # of the last complete load

    def load_draft(self: Any, path: str, digest: str | None = None) -> dict[str, Any]:
        """Load the weights of a draft with the same shape from the folder of a published version, or from the link to
        the newest one. Nothing is done if weights with this digest were loaded last. Returns the folder's name as
        `draft`, the `digest` of what was loaded, whether it `is_new`, and the `seconds`; or an `error`, because vLLM
        would drop the text of an exception. After an error, the draft may be a mixture until the next load."""
        began = time.perf_counter()
        if digest is not None and digest == self._draft_digest:
            return {"draft": Path(path).name, "digest": digest, "is_new": False, "seconds": 0.0}
        self._draft_digest = None
        try:
            folder = Path(path).resolve(strict=True)
            self._draft_digest = _load(self, folder)
        except Exception as error:  # noqa: BLE001 - it is returned
            return {"error": f"{type(error).__name__}: {error}", "seconds": time.perf_counter() - began}
        seconds = time.perf_counter() - began
        return {"draft": folder.name, "digest": self._draft_digest, "is_new": True, "seconds": seconds}


def _load(worker: Any, folder: Path) -> str:
    from vllm.config import set_current_vllm_config
    from vllm.config.utils import replace
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    model, settings = worker.get_draft_model(), worker.vllm_config.speculative_config
    if model is None or settings.draft_model_config is None:
        raise RuntimeError("this server drafts without a model; serve with the method draft_model or eagle3")
    config = replace(worker.vllm_config, model_config=settings.draft_model_config, quant_config=None)
    target = worker.get_model()
    shared, before = shared_modules(model, target), checksums(target)
    weights = Weights(folder, except_for=shared)
    for name, tensor in weights.left_out():
        module = next(m for n, m in model.named_modules() if n.rpartition(".")[2] == module_of(name))
        if not _holds(module, tensor):
            raise RuntimeError(
                f"{name} differs from the target's, with which this server shares it: restart the server with this "
                "draft. Nothing was loaded"
            )
    with set_current_vllm_config(config):
        reload_weights(config, model, iter(weights), None, True)
        for name, head in model.named_modules():
            # A head tied to the embeddings is not in the checkpoint; on CPUs it has packed the old weights.
            if isinstance(head, ParallelLMHead) and name.rpartition(".")[2] not in shared:
                head.quant_method.process_weights_after_loading(head)
                _check_head(head)
    if changed := [name for name, value in checksums(target).items() if value != before[name]]:
        raise RuntimeError(f"the load has changed weights of the target, {changed[0]} first: restart this server")
    return weights.digest


def module_of(name: str) -> str:
    """Return the own name of the module of a weight."""
    return name.rpartition(".")[0].rpartition(".")[2]


def shared_modules(draft: Any, target: Any) -> set[str]:
    """Return the names of modules, without those around them, whose weights a draft shares with its target: a head
    shares embeddings, and an output head that equals the target's. Nothing may be loaded into them."""
    modules = {id(module) for module in target.modules()}
    places = {p.data_ptr() for p in target.parameters() if p.numel()}
    found = set()
    for name, module in draft.named_modules():
        own = [p.data_ptr() for p in module.parameters(recurse=False) if p.numel()]
        if name and own and (id(module) in modules or not places.isdisjoint(own)):
            found.add(name.rpartition(".")[2])
    return found


def checksums(model: Any) -> dict[str, tuple[float, float]]:
    """Return two sums over the weights of each parameter and buffer of a model, which change with its weights."""
    import torch

    found = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.numel() and not tensor.is_meta:
            flat = tensor.detach().reshape(-1)
            part = flat[:: max(len(flat) // NUM_SUMMED, 1)].to(torch.float64)
            found[name] = float(part.sum()), float(part.abs().sum())
    return found


def _check_head(head: Any) -> None:
    """Check that an output head computes with the weights that it shows; raises RuntimeError. Otherwise only the
    acceptance rate would fall, without an error."""
    if not _computes(head, head.weight):
        raise RuntimeError("the output head computes with other weights than were loaded")


def _holds(module: Any, tensor: Any) -> bool:
    """Whether a module has these weights: of an output head, which may have packed them, whether it computes so."""
    import torch

    if hasattr(module, "quant_method") and "Head" in type(module).__name__:
        return _computes(module, tensor)
    own = module.weight[: len(tensor)]
    return own.shape == tensor.shape and torch.equal(own, tensor.to(own))


def _computes(head: Any, weight: Any) -> bool:
    import torch

    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(NUM_PROBES, weight.shape[1], generator=generator).to(head.weight)
    found = head.quant_method.apply(head, probe).float()[:, : len(weight)]
    wanted = (probe @ weight.to(probe).T).float()
    return bool((found - wanted).abs().max() <= TOLERANCE * wanted.abs().max())
