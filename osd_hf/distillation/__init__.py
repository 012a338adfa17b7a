"""Offline distillation, on the trainers of trl and transformers."""
