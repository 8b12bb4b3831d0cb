"""A message queue's transport to readers on other hosts: zmq sockets with CURVE encryption."""
