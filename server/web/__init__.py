"""The service's HTTP side: connections, routes, documents and logs."""
