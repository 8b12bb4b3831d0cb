"""The commands that look at running programs from outside."""
