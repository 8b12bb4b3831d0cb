"""The verbs of a communicator, which check arguments and make operations."""
