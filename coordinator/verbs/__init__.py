"""What a member of a group can do with it: the verbs over tensors, messages and experts."""
