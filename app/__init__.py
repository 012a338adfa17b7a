"""The Gradio demo of osd_hf: chat with a target while its draft learns. Installed as `osd_hf_app`."""
