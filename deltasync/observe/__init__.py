"""What operators see: listeners that measure, trace, log and draw syncs.

Each module takes the events of `deltasync.subscribe`, and nothing in the layers below knows of it.
`metrics.py` is for Prometheus (extra `metrics`), `flat.py` for W&B and TensorBoard, `spans.py` for
OpenTelemetry (extra `traces`), and `run_log.py` writes what `deltasync report` draws.
"""
