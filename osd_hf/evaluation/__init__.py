"""Measuring: systems side by side, before and after."""
