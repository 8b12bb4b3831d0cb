"""Changes the layouts of tensors, within one mesh and between meshes."""
