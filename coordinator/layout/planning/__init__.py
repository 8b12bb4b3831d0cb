"""Plans how to get from one layout to another, and what it costs. Only measuring communicates."""
