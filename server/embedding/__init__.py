"""Embeddings as a service: requests, batches, and routes."""
