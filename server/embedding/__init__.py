"""Embeddings as a service, apart from HTTP: requests, batches, and a watched pool."""
