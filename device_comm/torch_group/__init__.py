"""The backend that works over any torch process group."""
