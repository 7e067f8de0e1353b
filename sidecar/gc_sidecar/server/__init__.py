"""The sidecar's server: a FastAPI app that asks an engine's processes for a GC policy and proves it.

Start at `coordinator` (how a change runs), `sight` (how processes are seen) and `app` (the routes).
"""
