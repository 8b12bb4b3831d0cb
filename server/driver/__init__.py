"""The driver's side of a pool: plans, starts, watches and ends the workers."""
