"""What backends need of a CUDA device: memory, kernel launches, streams, and a watchdog."""
