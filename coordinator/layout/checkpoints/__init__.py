"""Reading and writing the parts of tensors that a rank holds, as safetensors files."""
