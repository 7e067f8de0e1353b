"""The published comparison on a real vLLM (CPU, tensor parallel 2): the same points under off, freeze and budget.

vLLM itself retains nothing from step to step here, so that its workers would run no full collection at all. As the
original sweep did, each worker keeps a few records of every step: RECORDS lists with a list in each. That is ours,
not vLLM's, and is all that makes pauses grow in this benchmark.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.sidecar_process import SidecarProcess
from tests.vllm.real_vllm import make_tiny_model
from tests.vllm.scene import Scene, pids_of, scene

RECORDS = 40
POLICIES = ("off", "freeze", "budget")
# At one request at a time every token is a step.
PROMPTS, OUTPUT_TOKENS, ROUNDS = (8, 32, 96), 100, 3
STEPS = 30_000

RETAIN = f"""
from vllm.v1.worker.worker_base import WorkerWrapperBase
if not hasattr(WorkerWrapperBase, "bench_records"):
    WorkerWrapperBase.bench_records, WorkerWrapperBase.bench_steps = [], 0
    WorkerWrapperBase.bench_execute = WorkerWrapperBase.execute_model
    def execute_model(self, *args, **kwargs):
        step = WorkerWrapperBase.bench_steps = WorkerWrapperBase.bench_steps + 1
        WorkerWrapperBase.bench_records += [[step, [number]] for number in range({RECORDS})]
        return self.bench_execute(*args, **kwargs)
    WorkerWrapperBase.execute_model = execute_model
"""
COUNT = """
from vllm.v1.worker.worker_base import WorkerWrapperBase
result = getattr(WorkerWrapperBase, "bench_steps", None)
"""


def workers(status: dict[str, Any]) -> dict[str, int]:
    """Their pids by name."""
    return {name: pid for name, pid in pids_of(status).items() if name.startswith("worker")}


def steps_of(running: Scene, sidecar: SidecarProcess) -> int:
    """How many steps every worker has made."""
    return int(min(running.probe.run(COUNT, workers(sidecar.status())).values()))


def run(out: Path, steps: int, engine_options: dict[str, Any]) -> dict[str, Any]:
    """The sweep, and its report."""
    requests = -(-steps // (len(PROMPTS) * OUTPUT_TOKENS * ROUNDS))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with (
            scene(
                directory, make_tiny_model(directory / "model"), tensor_parallel=2, **engine_options
            ) as running,
            running.sidecar("bench") as sidecar,
        ):
            sidecar.wait_for_coverage(4)
            for pid in workers(sidecar.status()).values():
                running.probe.run(running.probe.only(pid, RETAIN), {"it": pid})
            command = [
                *(sys.executable, "-m", "gc_sidecar", "sweep", f"--out={out}", "--fresh"),
                *(f"--url={sidecar.url}", f"--engine-url={running.engine.url}"),
                f"--prompt-tokens={','.join(map(str, PROMPTS))}",
                *(f"--output-tokens={OUTPUT_TOKENS}", "--concurrency=1", f"--requests={requests}"),
                *(f"--rounds={ROUNDS}", f"--policies={','.join(POLICIES)}", "--warm-up=1"),
            ]
            subprocess.run(command, check=True)
            made = steps_of(running, sidecar)
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    report["engine_steps"] = made
    return report


def main() -> int:
    """Print what the limits of the project say of it; 1 where one is not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench-vllm-sweep"))
    parser.add_argument("--steps", type=int, default=STEPS, help="of each policy")
    parser.add_argument("--images", type=Path, metavar="DIR", help="write the plots there, as SVG")
    args = parser.parse_args()
    print("starting vLLM (TP=2) ...", file=sys.stderr)
    report = run(args.out, args.steps, {})
    if args.images is not None:
        plots = re.findall("<svg.*?</svg>", (args.out / "report.html").read_text(), re.DOTALL)
        for name, plot in zip((*POLICIES, "distribution", "memory"), plots, strict=True):
            (args.images / f"sweep-{name}.svg").write_text(plot + "\n")
    found = {each["policy"]: each for each in report["policies"]}
    print(f"{report['engine_steps']:,} engine steps in all; {2 * RECORDS} objects retained at each")
    verdicts = {
        "the baseline has outliers by GC": found["off"]["gc_outliers"] > 0,
        "freeze has none": found["freeze"]["gc_outliers"] == 0,
        "budget has none": found["budget"]["gc_outliers"] == 0,
    }
    for what, is_so in verdicts.items():
        print(f"{what}: {'yes' if is_so else 'NO'}")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
