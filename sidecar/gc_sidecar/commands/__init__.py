"""The verbs of `gc-sidecar` that need more than the thin client: `serve`, `install-agent`, `demo`.

One module each, with `add_arguments(parser)` and `run(args) -> int`, imported only when asked for.
"""
