"""
The wrong way to load a draft into a running vLLM (0.32), for `doctor.py` to find: as
`osd_hf.engines.vllm_reload` does, but without packing heads again that are tied to the embeddings. On CPUs the old
head stays, and nothing says so.
"""

from __future__ import annotations

from typing import Any


class WrongReload:
    """Mixed into vLLM's worker by `--worker-extension-cls`."""

    def load_draft(self: Any, path: str) -> None:
        """
        Read the weights of a draft of the same shape into the one that serves, but for a tied head.

        Args:
            path (`str`): Folder of a published version.
        """
        from vllm.config import set_current_vllm_config
        from vllm.config.utils import replace
        from vllm.model_executor.model_loader.reload.inplace import reload_weights

        draft = self.vllm_config.speculative_config.draft_model_config
        config = replace(self.vllm_config, model_config=draft, quant_config=None)
        with set_current_vllm_config(config):
            reload_weights(config, self.get_draft_model(), None, path, True)
