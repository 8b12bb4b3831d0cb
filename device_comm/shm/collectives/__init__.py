"""Collectives through shared memory."""
