"""What the commands take, apart from what carries it out: a help text must not load torch."""
