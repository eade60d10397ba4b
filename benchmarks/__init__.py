"""How fast deltasync is, as ratios against plain torch and against its own dense sync.

`python -m benchmarks cpu` measures, `table` and `plot` show what was measured.
"""
