"""Groups over several hosts: which members share a host, and the state of those on others."""
