"""Who is in a group, what each member does, and whether the group was aborted."""
