"""Syncs that follow optimizer steps, and whether these step what is sent. Begin with hook.py."""
