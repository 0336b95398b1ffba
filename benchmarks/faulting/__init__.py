"""What `benchmarks/faults.py` is made of: faults, what has to hold after each, and where they strike."""
