"""The verbs of a communicator: each checks what it is given and makes an operation of it."""
