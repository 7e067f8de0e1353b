#!/usr/bin/env python3
"""Stands for `vllm` in two containers, so that the manifests' own command lines are run as they are.

`vllm serve` becomes the embedded engine. `vllm bench serve` sends requests for a moment, with the standard library
alone, for its image holds nothing else; STAND_IN_ENDS says how it ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import NoReturn


def option(name: str) -> str:
    """The value of a flag of the form --name=value."""
    return next(arg.partition("=")[2] for arg in sys.argv if arg.startswith(f"--{name}="))


def serve() -> NoReturn:
    """The embedded engine, on the port that vLLM was told."""
    command = ["python3", "-m", "gc_sidecar.embedded", "--port", option("port")]
    os.execvp(command[0], command)


def bench() -> int:
    """A few completions; what was measured goes where vLLM would write it."""
    url = f"{option('base-url')}/v1/completions"
    body = json.dumps({"prompt": "hello", "max_tokens": 8}).encode()
    for _ in range(20):
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()
    ends = os.environ.get("STAND_IN_ENDS", "well")
    print("measured 20 requests", flush=True)
    if ends == "never":
        time.sleep(600)
    (Path(option("result-dir")) / "result.json").write_text(json.dumps({"completed": 20}))
    return 0 if ends == "well" else int(ends)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    sys.exit(bench())
