"""What the embedded engine counts for Prometheus, under the names that dashboards and the sidecar know from vLLM.

Only the requests' gauges and three histograms have vLLM's names; what is ours alone begins with `embedded_`.
"""

from __future__ import annotations

from collections.abc import Sequence

from gc_sidecar.embedded.async_llm import CoreConnection
from gc_sidecar.embedded.histogram import Histogram, inter_token_histogram

REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Figures:
    """The figures of one API server; those of the engine cores come with each question."""

    def __init__(self) -> None:
        self.request_s = Histogram(
            "vllm:e2e_request_latency_seconds", "Time of a whole request.", REQUEST_S
        )

    def exposition(self, cores: Sequence[CoreConnection], model: str) -> str:
        """All of it, as text."""
        lines: list[str] = []
        engines = [core.statistics for core in cores]
        for name, kind, help, values in (
            ("vllm:num_requests_running", "gauge", "Requests that run.", [e.running for e in engines]),
            ("vllm:num_requests_waiting", "gauge", "Requests that wait.", [e.waiting for e in engines]),
            ("embedded_steps_total", "counter", "Steps since the start.", [e.steps for e in engines]),
            (
                "embedded_step_seconds_total", "counter", "Time that steps took.",
                [e.step_s for e in engines],
            ),
        ):  # fmt: skip
            lines += (f"# HELP {name} {help}", f"# TYPE {name} {kind}")
            lines += (
                f'{name}{{engine="{index}",model_name="{model}"}} {float(value)}'
                for index, value in enumerate(values)
            )
        # Without vLLM's buckets: nobody here asks how many tokens a step made.
        name = "vllm:iteration_tokens_total"
        lines += (f"# HELP {name} Tokens that a step made.", f"# TYPE {name} histogram")
        for core in cores:
            labels = f'engine="{core.index}",model_name="{model}"'
            lines.append(f'{name}_bucket{{{labels},le="+Inf"}} {core.iterations}')
            lines.append(f"{name}_sum{{{labels}}} {core.iteration_tokens}")
            lines.append(f"{name}_count{{{labels}}} {core.iterations}")
        lines += self.request_s.header()
        lines += self.request_s.samples(f'engine="0",model_name="{model}"')
        lines += inter_token_histogram().header()
        for core in cores:
            lines += core.inter_token_s.samples(f'engine="{core.index}",model_name="{model}"')
        return "\n".join(lines) + "\n"
