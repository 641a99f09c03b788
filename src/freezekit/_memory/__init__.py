"""What a training step needs on a GPU: trace, CUDA's differences, allocator, report."""
