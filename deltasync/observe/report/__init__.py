"""One HTML page of a run log: `page.py` makes it, of the rows of `series.py` and `charts.py`."""
