"""What all services have beneath HTTP: a watched pool, and what is counted and shown of it."""
