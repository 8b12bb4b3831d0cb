"""The layer that lets the processes of an inference server's group act as one."""
