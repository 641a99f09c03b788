"""What memory_accuracy.py measures: models, rows, comparisons."""
