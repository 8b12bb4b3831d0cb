"""What Linux tells of the machine: its cores, and what they share."""
