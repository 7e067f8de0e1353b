"""The verbs of the thin client, one module each, and what they share: `options` and `output`.

Standard library only: they run in images where nothing of ours is installed.
"""
