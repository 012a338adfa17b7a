"""What is published: drafts with their cards, and stores."""

from osd_hf.hub.push import push_folder, push_store, save_draft

__all__ = ["push_folder", "push_store", "save_draft"]
