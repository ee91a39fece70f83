"""The demo: a real policy, real agents and real tokens, built on the spot without a download.

`tokenizer.py` is the chat tokenizer, `policy.py` the model that samples and later judges its own tokens.
"""
