"""Messages between the driver and its workers: their types, and the channels that carry them."""
