"""Encode, seal, send and receive objects and dicts of tensors between members."""
