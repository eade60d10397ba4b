"""Adapters for vLLM, SGLang, verl, checkpoint-engine, transformers and PEFT.

Begin with engine_sync.py (the trainer's end) and worker.py (the engine's end).
"""
