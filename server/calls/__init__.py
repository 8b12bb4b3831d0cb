"""A pool's calls: sending them, collecting the ranks' replies, and handing out results."""
