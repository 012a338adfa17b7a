"""What each process of `processes.py` finds imported. It stays, so nobody looks through it for garbage."""

import gc
import importlib

MODULES = [
    "osd_hf_app.launch", "osd_hf.cli.app", "osd_hf.cli.learn", "osd_hf.cli.run", "osd_hf.cli.serve",
    "osd_hf.server.app",
    "transformers.models.llama.modeling_llama", "held_app", "processes",
]  # fmt: skip

gc.disable()
for name in MODULES:
    importlib.import_module(name)
gc.freeze()
gc.enable()
