"""Commands that inspect running programs from outside."""
