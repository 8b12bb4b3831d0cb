"""What `torch.compile` gets of a group: its collectives as ops, and a pass over its graphs."""
