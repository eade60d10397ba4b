"""Adapters for vLLM, SGLang, verl, checkpoint-engine, transformers and PEFT.

Begin with fleet.py (the trainer's end of any number of engines), engine.py (one of them, as the
trainer sees it) and worker.py (the engine's end).
"""
