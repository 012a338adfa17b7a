"""What is published: cards, drafts and stores on the Hub, drafts for serving engines."""

from osd_hf.hub.cards import facts_of, hub_id
from osd_hf.hub.push import check_push, push_folder, push_store, save_draft

__all__ = ["check_push", "facts_of", "hub_id", "push_folder", "push_store", "save_draft"]
