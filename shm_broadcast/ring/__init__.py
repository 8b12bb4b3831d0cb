"""The shared-memory ring between a queue's writer and its readers on the same host."""
