"""Messages between members: objects and dicts of tensors, how they are encoded, sent and sealed."""
