"""The worker pool and its service."""
