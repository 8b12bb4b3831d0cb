"""Plans kernel launches (pure functions), and the memory layout shared with the C++ kernels."""
