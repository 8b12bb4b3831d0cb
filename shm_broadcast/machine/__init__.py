"""What Linux tells of the machine: its cores, what they share, and which processes live."""
