"""A pool over several hosts: where they are, the link between them, and what each of them runs."""
