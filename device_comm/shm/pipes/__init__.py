"""Messages between two ranks through shared memory."""
