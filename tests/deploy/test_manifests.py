"""What deploy/ has for Kubernetes and compose: valid, of one mind with our commands, pods as safe as the chart's.

The examples for llm-d, KServe and Dynamo are held against Kubernetes' own schemas here, as pods. That the chart of
the one and the definitions of the others take them was tried by hand: those are not ours to keep a copy of.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gc_sidecar import __version__
from gc_sidecar.__main__ import VERBS as SIDECAR_VERBS
from gc_sidecar.server.settings import Settings, load_settings
from gc_sidecar_agent.cli import VERBS as INJECTED_VERBS
from gc_sidecar_agent.cli import build_parser
from scripts.get_helm import find_tool
from tests.chart.rendering import KUBERNETES, Judge
from tests.chart.rendering import judge as program_of_judges
from tests.deploy.kustomize import (
    COMPONENT,
    DEPLOY,
    EXAMPLE,
    Document,
    build,
    documents,
    kubectl,
    pod_of,
    try_to_build,
)
from tests.leaving_out import leave_out

REPOSITORY = DEPLOY.parent
EXAMPLES = DEPLOY / "examples"
POST_RENDERER = EXAMPLES / "production-stack" / "post-render.sh"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
RUN_DIR, AGENT_DIR = "/run/gc-sidecar", "/opt/gc-sidecar"
PLUGINS = "gc_sidecar,lora_filesystem_resolver,lora_hf_hub_resolver"

# Stands for what the vLLM production-stack's chart renders, as far as the post-renderer looks at it.
PRODUCTION_STACK = """\
apiVersion: apps/v1
kind: Deployment
metadata:
  name: stack-deployment-router
  labels: {app.kubernetes.io/component: router}
spec:
  selector: {matchLabels: {app.kubernetes.io/component: router}}
  template:
    metadata: {labels: {app.kubernetes.io/component: router}}
    spec:
      containers:
        - name: router-container
          image: lmcache/lmstack-router:latest
          args: [--host, 0.0.0.0]
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: stack-qwen3-deployment-vllm
  labels: {app.kubernetes.io/component: serving-engine}
spec:
  selector: {matchLabels: {app.kubernetes.io/component: serving-engine}}
  template:
    metadata: {labels: {app.kubernetes.io/component: serving-engine}}
    spec:
      containers:
        - name: vllm
          image: vllm/vllm-openai:v0.32.0
          command: [vllm, serve, Qwen/Qwen3-0.6B, --host, 0.0.0.0, --port, "8000"]
          env: [{name: HF_HOME, value: /tmp}]
          volumeMounts: [{name: shm, mountPath: /dev/shm}]
      volumes: [{name: shm, emptyDir: {medium: Memory}}]
"""


def file_of(path: Path) -> list[Document]:
    return documents(path.read_text())


def post_rendered() -> list[Document]:
    return documents(post_render(PRODUCTION_STACK))


def post_render(text: str, **environment: str) -> str:
    """What the post-renderer makes of it; a CalledProcessError where it fails."""
    path = f"{kubectl().parent}{os.pathsep}{os.defpath}"
    return subprocess.run(
        [str(POST_RENDERER)],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PATH": path, "HOME": "/nonexistent", **environment},
    ).stdout


def pod_of_llm_d() -> Document:
    """As llm-d's chart puts it together."""
    decode = yaml.safe_load((EXAMPLES / "llm-d" / "values.yaml").read_text())["decode"]
    own = ("modelCommand", "mountModelVolume")  # the chart's, not Kubernetes'
    containers = [{k: v for k, v in c.items() if k not in own} for c in decode["containers"]]
    volumes = [*decode["volumes"], {"name": "model-storage", "emptyDir": {}}]
    pod = {"initContainers": decode["initContainers"], "containers": containers, "volumes": volumes}
    found: Document = {**decode["extraConfig"], **pod}
    return found


def pod_of_kserve() -> Document:
    configuration, service = file_of(EXAMPLES / "kserve" / "llm-inference-service.yaml")
    assert service["spec"]["baseRefs"] == [{"name": configuration["metadata"]["name"]}]
    template: Document = configuration["spec"]["template"]
    return template


def pod_of_dynamo() -> Document:
    (graph,) = file_of(EXAMPLES / "dynamo" / "graph-deployment.yaml")
    (worker,) = (c for c in graph["spec"]["components"] if c["type"] == "worker")
    template: Document = worker["podTemplate"]["spec"]
    return template


def pod_of_engine(objects: list[Document]) -> Document:
    return pod_of([o for o in objects if "router" not in o["metadata"]["name"]])


PODS: dict[str, Callable[[], Document]] = {
    "the benchmark Job": lambda: pod_of(file_of(DEPLOY / "manifests" / "benchmark-job.yaml")),
    "the serving Deployment": lambda: pod_of(file_of(DEPLOY / "manifests" / "serving.yaml")),
    "the kustomize example": lambda: pod_of(build(EXAMPLE)),
    "the production-stack": lambda: pod_of_engine(post_rendered()),
    "llm-d": pod_of_llm_d,
    "KServe": pod_of_kserve,
    "Dynamo": pod_of_dynamo,
}
BOARD_ONLY = {"KServe", "Dynamo"}


@functools.cache
def as_text(name: str) -> str:
    return json.dumps(PODS[name]())


def pod(name: str) -> Document:
    """A pod by its name; the caller's to change."""
    found: Document = json.loads(as_text(name))
    return found


def containers(spec: Document) -> Iterator[Document]:
    yield from spec["initContainers"]
    yield from spec["containers"]


def ours(spec: Document) -> list[Document]:
    return [c for c in spec["initContainers"] if "/gc-sidecar:" in c["image"]]


def sidecar(spec: Document) -> Document:
    found: Document
    (found,) = (c for c in spec["initContainers"] if c["name"] == "gc-sidecar")
    return found


def engine(spec: Document) -> Document:
    """The container of vLLM: the one that is told where the run directory is, and is not ours."""
    (found,) = (
        c for c in containers(spec) if c not in ours(spec) and RUN_DIR in mounts(c).values()
    )
    return found


def environment(container: Document) -> dict[str, str]:
    return {v["name"]: v["value"] for v in container.get("env", []) if "value" in v}


def mounts(container: Document) -> dict[str, str]:
    return {m["name"]: m["mountPath"] for m in container.get("volumeMounts", [])}


def words(container: Document) -> list[str]:
    """What our entry point is called with, whether by `command` or by the image's own."""
    found = [*container.get("command", ["gc-sidecar"]), *container.get("args", [])]
    assert Path(found[0]).name == "gc-sidecar"
    return found[1:]


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    it = Judge()
    yield it
    it.close()


each_pod = pytest.mark.parametrize("name", PODS)
each_kubernetes = pytest.mark.parametrize("kubernetes", KUBERNETES)


# --- valid ---


@each_kubernetes
@pytest.mark.parametrize(
    "path", sorted((DEPLOY / "manifests").glob("*.yaml")), ids=lambda p: p.name
)
def test_a_plain_manifest_is_valid(judge: Judge, path: Path, kubernetes: str) -> None:
    assert judge.complaints(file_of(path), kubernetes) == []


@each_kubernetes
def test_what_kubectl_builds_is_valid(judge: Judge, kubernetes: str) -> None:
    assert judge.complaints(build(EXAMPLE), kubernetes) == []


@each_kubernetes
@each_pod
def test_a_pod_is_valid(judge: Judge, name: str, kubernetes: str) -> None:
    it = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod(name)}
    assert judge.complaints([it], kubernetes) == []


@each_pod
def test_every_mount_has_its_volume(name: str) -> None:
    spec = pod(name)
    volumes = {volume["name"] for volume in spec["volumes"]}
    mounted = {volume for container in containers(spec) for volume in mounts(container)}
    assert mounted <= volumes


# --- of one mind with our commands ---


def settings_of(container: Document, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """What `serve` makes of its flags and of its environment."""
    for variable in [v for v in os.environ if v.startswith("GC_SIDECAR_")]:
        monkeypatch.delenv(variable)
    for variable, value in environment(container).items():
        monkeypatch.setenv(variable, value)
    flags = vars(build_parser(SIDECAR_VERBS, chosen="serve").parse_args(words(container)))
    return load_settings({k: v for k, v in flags.items() if k in Settings.model_fields})


@each_pod
def test_the_sidecar_and_the_engine_mean_the_same_directory_and_port(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = pod(name)
    settings = settings_of(sidecar(spec), monkeypatch)
    assert settings.run_dir == environment(engine(spec))["GC_SIDECAR_RUN_DIR"] == RUN_DIR
    assert mounts(sidecar(spec)) == {
        next(v for v, p in mounts(engine(spec)).items() if p == RUN_DIR): RUN_DIR
    }
    # Loopback for all that changes anything; the other port is for the kubelet and Prometheus, and is named.
    assert settings.control_address == ("127.0.0.1", 9470)
    assert settings.open_address == ("0.0.0.0", 9471)
    assert [port["containerPort"] for port in sidecar(spec)["ports"]] == [9471]
    if name in BOARD_ONLY:
        assert settings.engine_url == ()
    else:
        started = " ".join([*engine(spec).get("command", []), *engine(spec).get("args", [])])
        port = settings.engine_url[0].rpartition(":")[2]
        assert f"--port={port}" in started or f"--port {port}" in started


@each_pod
def test_the_engine_starts_with_the_agent_that_the_init_container_writes(name: str) -> None:
    spec = pod(name)
    install = next(c for c in ours(spec) if words(c)[0] == "install-agent")
    args = build_parser(SIDECAR_VERBS, chosen="install-agent").parse_args(words(install))
    assert str(args.directory) == AGENT_DIR
    (volume,) = mounts(install)
    assert mounts(engine(spec))[volume] == AGENT_DIR
    assert all(m["readOnly"] for m in engine(spec)["volumeMounts"] if m["name"] == volume)
    if name == "KServe":  # whose command is a script of its own
        assert environment(engine(spec))["PYTHONPATH"] == AGENT_DIR
    else:
        assert engine(spec)["command"][0] == f"{AGENT_DIR}/bin/with-agent"
    # Without an engine URL nobody asks the endpoint, and a list of plugins shuts others out for nothing.
    has_endpoint = name not in BOARD_ONLY
    assert args.endpoint_plugin == has_endpoint
    assert environment(engine(spec)).get("VLLM_PLUGINS") == (PLUGINS if has_endpoint else None)


def test_run_takes_the_flags_that_the_benchmark_gives_it() -> None:
    (main,) = pod("the benchmark Job")["containers"]
    args = build_parser(INJECTED_VERBS, chosen="run").parse_args(words(main))
    assert args.policy == "freeze"
    assert args.require_clean
    assert args.command[:3] == ["--", "vllm", "bench"]
    assert main["workingDir"] == os.path.dirname(args.report) == mounts(main)["results"]
    assert args.verdict_file == "/dev/termination-log"  # Kubernetes' default


def test_each_exit_code_of_ours_has_its_rule() -> None:
    (job,) = file_of(DEPLOY / "manifests" / "benchmark-job.yaml")
    rules = job["spec"]["podFailurePolicy"]["rules"]
    codes = [c for r in rules if "onExitCodes" in r for c in r["onExitCodes"]["values"]]
    assert codes == [123, 124, 125, 126, 127]
    assert {r["onExitCodes"]["containerName"] for r in rules if "onExitCodes" in r} == {"benchmark"}
    assert job["spec"]["backoffLimit"] == 0


@each_pod
def test_our_image_has_this_release_s_tag(name: str) -> None:
    assert {c["image"] for c in ours(pod(name))} == {f"ghcr.io/gc-sidecar/gc-sidecar:{__version__}"}


# --- as safe as the chart's ---


@each_pod
def test_only_the_engine_and_the_sidecar_see_the_run_directory(name: str) -> None:
    spec = pod(name)
    (volume,) = mounts(sidecar(spec))
    seen_by = [c["name"] for c in containers(spec) if volume in mounts(c)]
    assert sorted(seen_by) == sorted(["gc-sidecar", engine(spec)["name"]])
    (source,) = (v["emptyDir"] for v in spec["volumes"] if v["name"] == volume)
    assert source["medium"] == "Memory"
    assert source["sizeLimit"] == "32Mi"
    # What makes files of the one readable for the other, whatever their users.
    assert spec["securityContext"]["fsGroup"] == 65532


@each_pod
def test_our_containers_pass_the_restricted_standard(name: str) -> None:
    spec = pod(name)
    for container in ours(spec):
        both = {**spec["securityContext"], **container["securityContext"]}
        assert both["runAsNonRoot"] is True
        assert both["runAsUser"] == both["runAsGroup"] == 65532
        assert both["allowPrivilegeEscalation"] is False
        assert both["readOnlyRootFilesystem"] is True
        assert both["capabilities"] == {"drop": ["ALL"]}
        assert both["seccompProfile"] == {"type": "RuntimeDefault"}


@each_pod
def test_our_containers_see_no_gpu_and_have_a_fixed_size(name: str) -> None:
    for container in ours(pod(name)):
        assert environment(container)["NVIDIA_VISIBLE_DEVICES"] == "void"
        assert container["resources"]["requests"] == container["resources"]["limits"]


@each_pod
def test_the_sidecar_holds_nobody_up(name: str) -> None:
    spec = pod(name)
    assert sidecar(spec)["restartPolicy"] == "Always"
    # It would take vLLM out of its Service.
    assert "readinessProbe" not in sidecar(spec)
    assert sidecar(spec)["startupProbe"]["httpGet"]["path"] == "/healthz"
    assert all("restartPolicy" not in container for container in spec["containers"])


def test_no_probe_keeps_the_benchmark_from_starting() -> None:
    assert not any(key.endswith("Probe") for key in engine(pod("the benchmark Job")))


# --- the component ---


def overlay(directory: Path, deployment: Document, *components: str) -> Path:
    """A kustomization of this Deployment with the component, and with others of ours."""
    names = ["component", *components]
    for name in names:
        shutil.copytree(COMPONENT.parent / name, directory / name)
    (directory / "deployment.yaml").write_text(yaml.safe_dump(deployment))
    kustomization = {"resources": ["deployment.yaml"], "components": names}
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return directory


@pytest.fixture
def deployment() -> Document:
    """The example's Deployment, as it is before the component."""
    found: Document = file_of(EXAMPLE / "vllm.yaml")[0]
    return found


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_the_component_leaves_everything_else_as_it_was(
    tmp_path: Path, deployment: Document, kind: str
) -> None:
    deployment["kind"] = kind
    before = deployment["spec"]["template"]["spec"]
    before["initContainers"] = [{"name": "download", "image": "busybox:1"}]
    before["containers"].append({"name": "beside", "image": "busybox:1"})
    (built,) = build(overlay(tmp_path, deployment))
    after = built["spec"]["template"]["spec"]
    assert after["containers"][1] == before["containers"][1]
    assert {"name": "download", "image": "busybox:1"} in after["initContainers"]
    assert len(after["initContainers"]) == 3
    was, now = before["containers"][0], after["containers"][0]
    assert now["command"][1:] == was["command"]
    for key in ("env", "volumeMounts"):
        assert now[key][: len(was[key])] == was[key]
        assert len(now[key]) == len(was[key]) + 2
    unchanged = set(was) - {"command", "env", "volumeMounts"}
    assert {key: now[key] for key in unchanged} == {key: was[key] for key in unchanged}
    assert all(volume in after["volumes"] for volume in before["volumes"])


def test_the_component_passes_over_what_is_marked(tmp_path: Path, deployment: Document) -> None:
    deployment["metadata"]["labels"]["gc-sidecar/inject"] = "false"
    assert build(overlay(tmp_path, deployment)) == [deployment]


@pytest.mark.parametrize("key", ["command", "env", "volumeMounts"])
def test_the_component_says_what_a_container_lacks(
    tmp_path: Path, deployment: Document, key: str
) -> None:
    del deployment["spec"]["template"]["spec"]["containers"][0][key]
    failed = try_to_build(overlay(tmp_path, deployment))
    assert failed.returncode != 0
    assert f'missing path: "/spec/template/spec/containers/0/{key}' in failed.stderr.replace(
        "\\", ""
    )


@each_kubernetes
def test_one_run_reaches_the_sidecars_of_an_exposed_deployment(
    judge: Judge,
    tmp_path: Path,
    deployment: Document,
    kubernetes: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects = build(overlay(tmp_path, deployment, "exposed"))
    assert judge.complaints(objects, kubernetes) == []
    (service,) = (o for o in objects if o["kind"] == "Service")
    template = next(o for o in objects if o["kind"] == "Deployment")["spec"]["template"]
    (job,) = file_of(DEPLOY / "manifests" / "benchmark-many-pods.yaml")
    client = job["spec"]["template"]["spec"]
    run = build_parser(INJECTED_VERBS, chosen="run").parse_args(words(client["containers"][0]))
    # The Service finds the pods, whether they are ready or not, and `run` finds the Service.
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    settings = settings_of(sidecar(template["spec"]), monkeypatch)
    assert settings.control_address == ("0.0.0.0", 9470)
    assert run.url == [f"dns+http://{service['metadata']['name']}:9470"]
    # Both have the token of one Secret.
    for spec, container, path in (
        (template["spec"], sidecar(template["spec"]), settings.token_file),
        (client, client["containers"][0], run.token_file),
    ):
        (volume,) = (v for v in spec["volumes"] if "secret" in v)
        assert volume["secret"]["secretName"] == "gc-sidecar-token"
        assert f"{mounts(container)[volume['name']]}/token" == path


# --- the production-stack's post-renderer ---


def test_the_post_renderer_adds_to_engines_and_leaves_the_router() -> None:
    router, _ = documents(PRODUCTION_STACK)
    assert router in post_rendered()
    assert "gc-sidecar" in [c["name"] for c in pod("the production-stack")["initContainers"]]


def test_the_post_renderer_fails_where_it_would_have_changed_nothing() -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        post_render(PRODUCTION_STACK, GC_SIDECAR_SELECTOR="app.kubernetes.io/component=other")
    assert "no Deployment with the label app.kubernetes.io/component=other" in failed.value.stderr
    assert failed.value.stdout == ""


@pytest.mark.parametrize("name", ["helm3", "helm4"])
def test_both_helms_take_the_post_renderer(tmp_path: Path, name: str) -> None:
    helm = find_tool(name)
    if helm is None:
        leave_out(f"there is no {name}: python scripts/get_helm.py")
    chart = tmp_path / "chart"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("{apiVersion: v2, name: vllm-stack, version: 0.1.0}")
    (chart / "templates" / "all.yaml").write_text(PRODUCTION_STACK)
    variables = {"PATH": f"{kubectl().parent}{os.pathsep}{os.defpath}", "HOME": str(tmp_path)}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [str(helm), *arguments], capture_output=True, text=True, timeout=60, check=False, env=variables
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    renderer = str(POST_RENDERER)
    if name == "helm4":
        run("plugin", "install", str(POST_RENDERER.parent))
        renderer = "gc-sidecar"
    rendered = documents(run("template", "stack", str(chart), "--post-renderer", renderer))
    specs = [o["spec"]["template"]["spec"] for o in rendered]
    assert sorted(len(spec.get("initContainers", [])) for spec in specs) == [0, 2]


# --- the image's recipe ---


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    command = [program_of_judges("hadolint"), str(REPOSITORY / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_build_sees_what_it_copies_and_nothing_else() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in lines if line.startswith("!")}
    copied = [
        line.split()[1:-1]
        for line in (REPOSITORY / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
    ]
    assert "*" in lines
    assert {name.rstrip("/") for names in copied for name in names} == let_in


# --- what people read ---


def test_the_page_on_kubernetes_links_to_what_there_is() -> None:
    text = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) > 10
    assert [link for link in links if not (REPOSITORY / "docs" / link).exists()] == []


def test_the_page_on_kubernetes_asks_for_this_release() -> None:
    text = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    assert set(re.findall(r"(?:gc-sidecar:|ref=v)(\d[\w.]*)", text)) == {__version__}


# --- compose ---


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return found


def test_the_compose_file_is_valid() -> None:
    command = [
        program_of_judges("check-jsonschema"),
        "--builtin-schema",
        "vendor.compose-spec",
        str(COMPOSE),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_every_file_and_volume_that_compose_mounts_is_there(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE.parent / source).exists(), source
            else:
                assert source in compose["volumes"]


def test_compose_publishes_on_loopback_only_and_never_the_control_listener(
    compose: dict[str, Any],
) -> None:
    published = [
        port for service in compose["services"].values() for port in service.get("ports", [])
    ]
    assert published
    assert all(port.startswith("127.0.0.1:") and "9470" not in port for port in published)


def test_the_sidecar_of_compose_has_the_settings_that_it_means(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = compose["services"]["gc-sidecar"]
    it = {
        "env": [{"name": n, "value": v} for n, v in service["environment"].items()],
        "args": service["command"],
    }
    settings = settings_of(it, monkeypatch)
    assert settings.run_dir == RUN_DIR
    assert settings.engine_url == ("http://vllm:8000",)
    assert f"run-dir:{RUN_DIR}" in service["volumes"]
    assert f"run-dir:{RUN_DIR}" in compose["services"]["vllm"]["volumes"]
    # Both are in the directory's group.
    assert "gid=65532" in compose["volumes"]["run-dir"]["driver_opts"]["o"]
    assert service["group_add"] == compose["services"]["vllm"]["group_add"] == ["65532"]


def test_compose_takes_the_image_that_make_image_builds(compose: dict[str, Any]) -> None:
    name = f"${{GC_SIDECAR_IMAGE:-localhost/gc-sidecar:{__version__}}}"
    for service in ("install-agent", "gc-sidecar"):
        assert compose["services"][service]["image"] == name


def test_prometheus_of_compose_scrapes_the_sidecar_by_the_name_it_has_there(
    compose: dict[str, Any],
) -> None:
    config = yaml.safe_load((COMPOSE.parent / "prometheus.yaml").read_text())
    targets = [
        t for job in config["scrape_configs"] for s in job["static_configs"] for t in s["targets"]
    ]
    assert targets == ["gc-sidecar:9471", "vllm:8000"]
    assert {target.split(":")[0] for target in targets} <= set(compose["services"])
    mounted = [m.split(":")[1] for m in compose["services"]["prometheus"]["volumes"]]
    assert [f"/etc/prometheus/{name}" for name in config["rule_files"]] == mounted[1:]


def test_grafana_of_compose_has_every_dashboard_and_the_datasource(compose: dict[str, Any]) -> None:
    provisioning = COMPOSE.parent / "grafana"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert source["isDefault"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "gc-sidecar.yaml").read_text())[
        "providers"
    ]
    mounted = {m.split(":")[1] for m in compose["services"]["grafana"]["volumes"]}
    dashboards = {path.name for path in (DEPLOY / "grafana").glob("gc-sidecar-*.json")}
    assert {f"{provider['options']['path']}/{name}" for name in dashboards} <= mounted
