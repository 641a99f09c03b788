"""The parts of the benchmark ``benchmarks/four_combos.py``."""
