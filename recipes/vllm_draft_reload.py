"""
New weights for the draft of a running vLLM (0.32): a worker extension, for vLLM's own environment.

    PYTHONPATH=recipes VLLM_SERVER_DEV_MODE=1 vllm serve TARGET --worker-extension-cls vllm_draft_reload.DraftReload \\
        --speculative-config '{"method": "draft_model", "model": "VERSIONS/latest", "num_speculative_tokens": 5}'
    curl localhost:8000/collective_rpc -H 'Content-Type: application/json' \\
        -d '{"method": "load_draft", "args": ["VERSIONS/latest"]}'

The development mode opens endpoints that strangers must not reach. Requests go on: their answers are the target's own
whatever the draft says. What the draft has cached of prompts is of its old weights, so empty that, too:

    curl -X POST 'localhost:8000/reset_prefix_cache?reset_running_requests=true'

Run on a CPU; on GPUs it takes the same functions of vLLM.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


class DraftReload:
    """Mixed into vLLM's worker by `--worker-extension-cls`."""

    def load_draft(self: Any, path: str) -> dict[str, Any]:
        """
        Read the weights of a draft of the same shape into the one that serves.

        Args:
            path (`str`):
                Folder of a published version, or the link to the newest.

        Returns:
            `dict[str, Any]`: the folder that was read, and the seconds that it took.
        """
        from vllm.config import set_current_vllm_config
        from vllm.config.utils import replace
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload.inplace import reload_weights

        began, folder = time.perf_counter(), Path(path).resolve(strict=True)
        model, settings = self.get_draft_model(), self.vllm_config.speculative_config
        if model is None or settings.draft_model_config is None:
            raise RuntimeError("This server drafts without a model; serve with the method draft_model.")
        config = replace(self.vllm_config, model_config=settings.draft_model_config, quant_config=None)
        with set_current_vllm_config(config):
            reload_weights(config, model, None, str(folder), True)
            for head in model.modules():
                # One that is tied to the embeddings is no layer of the checkpoint; on CPUs it has packed the old ones.
                if isinstance(head, ParallelLMHead):
                    head.quant_method.process_weights_after_loading(head)
        return {"draft": folder.name, "seconds": time.perf_counter() - began}
