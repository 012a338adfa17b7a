"""Engines such as vLLM: collect their answers, learn from stores, publish draft versions and deploy them."""
