"""The message queue: one writer, many readers, on the writer's host and on others."""
