"""
New weights for the draft of a running vLLM (0.32): a worker extension, for vLLM's own environment.

    pip install --no-deps osd-hf                # beside vLLM: nothing but this file is loaded of it
    VLLM_SERVER_DEV_MODE=1 vllm serve TARGET --worker-extension-cls osd_hf.engines.vllm_reload.DraftReload \\
        --speculative-config '{"method": "draft_model", "model": "static", "num_speculative_tokens": 5}'

`osd-hf learn --deploy reload=URL` calls it. The development mode opens endpoints that strangers must not reach.
Requests go on: their answers are the target's own whatever the draft says. Run on a CPU; on GPUs it takes the same
functions of vLLM.

This module is imported where only vLLM's packages are: nothing of this package may be imported here.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["DraftReload", "Weights", "weights_digest"]

PROBES = 4  # random vectors that a head is tried on
TOLERANCE = 0.05  # of the largest logit; half precisions round


class Weights:
    """
    The weights in the safetensors files of a folder, to be iterated once, and a digest of what has been handed out:
    SHA-256 over names, dtypes, shapes and bytes, in the order of names. The files that they are spread over do not
    matter.

    Args:
        folder (`Path`): Such as a published version.

    Raises:
        FileNotFoundError: there are no weights.
    """

    def __init__(self, folder: Path) -> None:
        self._files = sorted(folder.glob("*.safetensors"))
        if not self._files:
            raise FileNotFoundError(f"{folder} holds no weights in the format of safetensors")
        self._found: dict[str, bytes] = {}

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        import torch
        from safetensors import safe_open

        for path in self._files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    tensor = file.get_tensor(name)
                    own = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                    own.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
                    self._found[name] = own.digest()
                    yield name, tensor

    @property
    def digest(self) -> str:
        """64 hexadecimal digits."""
        return hashlib.sha256(b"".join(own for _, own in sorted(self._found.items()))).hexdigest()


def weights_digest(folder: Path) -> str:
    """The digest of the weights in a folder (see [`Weights`]); raises FileNotFoundError where there are none."""
    weights = Weights(folder)
    for _ in weights:
        pass
    return weights.digest


class DraftReload:
    """Mixed into vLLM's worker by `--worker-extension-cls`."""

    _draft_digest: str | None = None  # of what was loaded here to its end

    def load_draft(self: Any, path: str, digest: str | None = None) -> dict[str, Any]:
        """
        Read the weights of a draft of the same shape into the one that serves. Nothing is raised, as errors of workers
        reach nobody as text.

        Args:
            path (`str`):
                Folder of a published version, or the link to the newest.
            digest (`str`, *optional*):
                That of its weights; where these were loaded last, nothing is done.

        Returns:
            `dict[str, Any]`: the folder that was read, the `digest` of what was loaded, whether it `is_new`, and the
            seconds that it took; or an `error`, after which the draft may be a mixture until it is loaded again.
        """
        began = time.perf_counter()
        if digest is not None and digest == self._draft_digest:
            return {"draft": Path(path).name, "digest": digest, "is_new": False, "seconds": 0.0}
        self._draft_digest = None
        try:
            folder = Path(path).resolve(strict=True)
            self._draft_digest = _load(self, folder)
        except Exception as error:  # noqa: BLE001 - it is told
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
        raise RuntimeError("this server drafts without a model; serve with the method draft_model")
    config = replace(worker.vllm_config, model_config=settings.draft_model_config, quant_config=None)
    weights = Weights(folder)
    with set_current_vllm_config(config):
        reload_weights(config, model, iter(weights), None, True)
        for head in model.modules():
            # One that is tied to the embeddings is no layer of the checkpoint; on CPUs it has packed the old ones.
            if isinstance(head, ParallelLMHead):
                head.quant_method.process_weights_after_loading(head)
                _check_head(head)
    return weights.digest


def _check_head(head: Any) -> None:
    """Raises RuntimeError for a head that computes with other weights than those that it shows: its logits are what a
    draft is accepted by, and nothing else would tell."""
    import torch

    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(PROBES, head.weight.shape[1], generator=generator).to(head.weight)
    found, wanted = head.quant_method.apply(head, probe).float(), (probe @ head.weight.T).float()
    if not (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max():
        raise RuntimeError("the output head computes with other weights than were loaded")
