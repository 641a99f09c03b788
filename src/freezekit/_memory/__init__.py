"""What a training step needs on a GPU. So far: the CUDA caching allocator, simulated."""
