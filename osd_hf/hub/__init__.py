"""What is published: cards, drafts and stores on the Hub, drafts for serving engines."""

from osd_hf.hub.push import push_folder, push_store, save_draft

__all__ = ["push_folder", "push_store", "save_draft"]
