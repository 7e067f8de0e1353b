"""What holds for every pod that the chart renders, whatever the values."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.chart.cases import BENCHMARKS, CASES, EVERYTHING, SERVED, Case
from tests.chart.rendering import (
    CHART,
    Document,
    container,
    containers,
    environment,
    of_kind,
    pod,
    render,
    template,
    workload,
)

EACH = pytest.mark.parametrize("case", CASES, ids=str)
EACH_BENCHMARK = pytest.mark.parametrize("case", BENCHMARKS, ids=str)
EACH_SERVED = pytest.mark.parametrize("case", SERVED, ids=str)
KUBERNETES = "1.33"
# What the values brought themselves.
FOREIGN = {"beside", "before"}
KINDS = {
    "Job", "Deployment", "Service", "NetworkPolicy", "ConfigMap", "PodMonitor", "ServiceMonitor", "PrometheusRule",
}  # fmt: skip


def ours(spec: Document) -> list[Document]:
    return [each for each in containers(spec) if each["name"] not in FOREIGN]


def has_gpus(each: Document) -> bool:
    resources = each["resources"]
    return bool(resources.get("claims")) or any(
        "nvidia.com/" in name for name in resources["limits"]
    )


def flags(each: Document) -> list[str]:
    """Those of our own commands: what stands behind `--` is another's."""
    args: list[str] = each["args"]
    return args[: args.index("--")] if "--" in args else args


@EACH
def test_no_rights_secrets_or_definitions_are_rendered_and_no_hooks(case: Case) -> None:
    documents = case.render()

    assert {document["kind"] for document in documents} <= KINDS
    for document in documents:
        assert document["metadata"]["namespace"] == "bench"
        assert not [
            key
            for key in document["metadata"].get("annotations", {})
            if key.startswith("helm.sh/hook")
        ]


@EACH
def test_the_pod_has_no_token_of_a_service_account(case: Case) -> None:
    assert pod(case.render())["automountServiceAccountToken"] is False


@EACH
def test_services_of_others_set_no_variables_in_it(case: Case) -> None:
    """A Service called vllm would set VLLM_PORT=tcp://..., at which vLLM stops."""
    assert pod(case.render())["enableServiceLinks"] is False


@EACH
def test_the_pod_is_guaranteed(case: Case) -> None:
    for each in containers(pod(case.render())):
        limits = each["resources"]["limits"]
        assert each["resources"].get("requests", limits) == limits, each["name"]
        assert {"cpu", "memory"} <= set(limits), each["name"]


@EACH
def test_a_container_without_gpus_sees_none(case: Case) -> None:
    """A CUDA image without a GPU request sees all of the node's."""
    for each in ours(pod(case.render())):
        hidden = environment(each).get("NVIDIA_VISIBLE_DEVICES") == "void"
        assert hidden is not has_gpus(each), each["name"]


@EACH
@pytest.mark.parametrize("kubernetes", ["1.29", "1.37"])
def test_only_init_containers_have_a_restart_policy(case: Case, kubernetes: str) -> None:
    """On another container it is ignored, or refused."""
    if case.since > kubernetes:
        kubernetes = case.since
    spec = pod(case.render(kubernetes=kubernetes))

    assert not [each["name"] for each in spec["containers"] if "restartPolicy" in each]
    native = [
        each["name"] for each in spec["initContainers"] if each.get("restartPolicy") == "Always"
    ]
    assert native == (
        ["gc-sidecar", "vllm"] if workload(case.render())["kind"] == "Job" else ["gc-sidecar"]
    )


@EACH
def test_every_container_passes_the_restricted_standard(case: Case) -> None:
    needs_root = case.name == "an image that needs root"
    spec = pod(case.render())

    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["securityContext"]["runAsNonRoot"] is not needs_root
    assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & set(spec)
    for each in ours(spec):
        context = each["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        assert context["privileged"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        runs_as_root = needs_root and each["name"] in ("vllm", "benchmark")
        assert context["runAsNonRoot"] is not runs_as_root
        assert (context.get("runAsUser") == 0) is runs_as_root
        added = context["capabilities"].get("add", [])
        assert added == (
            ["IPC_LOCK"]
            if case.values.get("vllm") == EVERYTHING["vllm"] and each["name"] == "vllm"
            else []
        )


@pytest.mark.parametrize("mode", ["benchmark", "serve"])
def test_on_openshift_no_user_and_no_group_is_rendered(mode: str) -> None:
    def fields(node: Any) -> set[str]:
        if isinstance(node, dict):
            return set(node).union(*(fields(value) for value in node.values()))
        return set().union(*(fields(value) for value in node)) if isinstance(node, list) else set()

    spec = pod(render({"mode": mode, "openshift": True}))

    assert not {"runAsUser", "runAsGroup", "fsGroup", "supplementalGroups"} & fields(spec)
    assert spec["securityContext"]["runAsNonRoot"] is True


@EACH
def test_engine_and_sidecar_share_the_run_directory_and_nobody_else_sees_it(case: Case) -> None:
    spec = pod(case.render())
    who = [
        each["name"]
        for each in containers(spec)
        if any(mount["name"] == "run-dir" for mount in each.get("volumeMounts", []))
    ]

    assert sorted(who) == ["gc-sidecar", "vllm"]
    (volume,) = (volume for volume in spec["volumes"] if volume["name"] == "run-dir")
    assert volume["emptyDir"]["medium"] == "Memory"
    if not case.values.get("openshift"):
        # Different users: what they have in common is the pod's group.
        assert spec["securityContext"]["fsGroup"] > 0
    # As a variable in both, so that `gc-sidecar doctor` needs no flag in either.
    for name in who:
        variables = environment(container(case.render(), name))
        assert variables["GC_SIDECAR_RUN_DIR"] == "/run/gc-sidecar"


@EACH
def test_no_empty_directory_grows_without_a_limit(case: Case) -> None:
    for volume in pod(case.render())["volumes"]:
        assert "emptyDir" not in volume or volume["emptyDir"].get("sizeLimit"), volume["name"]


@EACH
def test_every_mount_has_its_volume_and_every_volume_is_mounted(case: Case) -> None:
    spec = pod(case.render())
    mounted = {mount["name"] for each in containers(spec) for mount in each.get("volumeMounts", [])}
    volumes = [volume["name"] for volume in spec["volumes"]]

    assert sorted(volumes) == sorted(mounted)
    for each in containers(spec):
        paths = [mount["mountPath"] for mount in each.get("volumeMounts", [])]
        assert len(paths) == len(set(paths)), each["name"]


@EACH
def test_the_engine_can_write_where_it_has_to(case: Case) -> None:
    engine = container(case.render(), "vllm")
    variables = environment(engine)
    writable = {mount["mountPath"] for mount in engine["volumeMounts"] if not mount.get("readOnly")}

    # Without a passwd entry PyTorch needs USER, and everything needs a HOME that can be written to.
    assert variables["USER"] == variables["LOGNAME"]
    assert {variables["HOME"], f"{variables['HOME']}/.cache", "/dev/shm", "/tmp"} <= writable


@EACH
def test_the_engine_starts_behind_the_agent(case: Case) -> None:
    documents = case.render()
    engine, agent = container(documents, "vllm"), container(documents, "install-agent")
    (target,) = (mount["mountPath"] for mount in agent["volumeMounts"] if mount["name"] == "agent")

    assert agent["args"][0] == target
    assert engine["command"][0] == f"{target}/bin/with-agent"
    assert "PYTHONPATH" not in environment(engine)


@EACH
def test_each_transport_sets_what_it_needs_and_no_more(case: Case) -> None:
    documents = case.render()
    transport = case.values.get("transport", "plugin")
    engine, sidecar = container(documents, "vllm"), container(documents, "gc-sidecar")
    variables = environment(engine)
    plugins = variables.get("VLLM_PLUGINS", "").split(",")
    own = case.values.get("vllm", {}).get("plugins", [])

    if transport == "plugin" or own:
        # A list shuts out all that it does not name, vLLM's own two included.
        assert plugins == ["gc_sidecar", "lora_filesystem_resolver", "lora_hf_hub_resolver", *own]
    else:
        assert plugins == [""]
    assert ("--endpoint-plugin" in container(documents, "install-agent")["args"]) is (
        transport == "plugin"
    )
    assert ("GC_SIDECAR_ENGINE_URL" in environment(sidecar)) is (transport != "board")
    assert ("VLLM_SERVER_DEV_MODE" in variables) is (transport == "dev")
    if transport == "dev":
        assert "--host=127.0.0.1" in engine["args"]


@EACH_BENCHMARK
def test_a_benchmark_starts_agent_sidecar_engine_and_then_itself(case: Case) -> None:
    spec = pod(case.render())

    assert [each["name"] for each in ours(spec)] == [
        "install-agent",
        "gc-sidecar",
        "vllm",
        "benchmark",
    ]
    assert [each["name"] for each in spec["containers"] if each["name"] not in FOREIGN] == [
        "benchmark"
    ]
    assert spec["restartPolicy"] == "Never"


@EACH_BENCHMARK
def test_in_a_benchmark_only_ours_has_a_probe(case: Case) -> None:
    """One on vLLM would keep the benchmark back until it passes, and hide a crash loop."""
    documents = case.render()
    for each in ours(pod(documents)):
        probes = {key for key in each if key.endswith("Probe")}
        assert probes == ({"startupProbe"} if each["name"] == "gc-sidecar" else set()), each["name"]


@EACH_SERVED
@pytest.mark.parametrize("kubernetes", ["1.28", "1.33"])
def test_where_it_serves_ours_cannot_take_the_engine_out_of_its_service(
    case: Case, kubernetes: str
) -> None:
    documents = case.render(kubernetes=kubernetes)
    sidecar, engine = container(documents, "gc-sidecar"), container(documents, "vllm")

    assert "readinessProbe" not in sidecar
    for kind in ("startupProbe", "livenessProbe"):
        # Of our own process: its health says nothing of the engine's.
        assert sidecar[kind]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert engine[kind]["httpGet"] == {"path": "/health", "port": "http"}


def test_a_maintenance_cannot_outlast_the_liveness_probe() -> None:
    """The kubelet would kill an engine that is only collecting."""
    documents = render({"mode": "serve"})
    probe = container(documents, "vllm")["livenessProbe"]
    (limit,) = (
        int(arg.partition("=")[2])
        for arg in container(documents, "gc-sidecar")["args"]
        if arg.startswith("--max-maintain-pause-s=")
    )

    # The first probe may begin just before, and each may take its timeout until it counts.
    assert limit < probe["periodSeconds"] * (probe["failureThreshold"] - 1)


@EACH
def test_named_ports_of_probes_are_there(case: Case) -> None:
    for each in containers(pod(case.render())):
        ports = {port["name"] for port in each.get("ports", [])}
        for key, probe in each.items():
            if key.endswith("Probe"):
                assert probe["httpGet"]["port"] in ports


@EACH_BENCHMARK
def test_the_job_tries_once_and_says_by_its_rules_what_it_was(case: Case) -> None:
    spec = workload(case.render())["spec"]
    settings = case.values.get("benchmark", {})

    assert spec["backoffLimit"] == 0
    assert spec["activeDeadlineSeconds"] > 0
    assert spec.get("ttlSecondsAfterFinished") == settings.get("ttlSecondsAfterFinished")
    rules = spec["podFailurePolicy"]["rules"]
    codes = [rule["onExitCodes"] for rule in rules if rule["action"] == "FailJob"]
    assert {code["containerName"] for code in codes} == {"benchmark"}
    assert [code["values"] for code in codes] == [[123], [124], [125], [126, 127], [0]]
    assert [code["operator"] for code in codes] == ["In", "In", "In", "In", "NotIn"]
    # Before the others: who is evicted ends by a signal too.
    ignored = [rule for rule in rules if rule["action"] == "Ignore"]
    assert ignored == (rules[:1] if settings.get("retryOnDisruption", True) else [])


@EACH_BENCHMARK
def test_a_job_s_name_ends_in_the_release_s_revision(case: Case) -> None:
    """A Job's template cannot change: the next revision has to be another Job."""
    name = workload(case.render())["metadata"]["name"]

    assert name.endswith("-1")
    suffix = case.values.get("benchmark", {}).get("suffix")
    assert suffix is None or name.endswith(f"-{suffix}-1")


def test_the_revision_in_the_name_is_the_release_s() -> None:
    """`helm template` knows no other than 1, so what is rendered cannot tell it from a plain 1."""
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    name = helpers.partition('define "gc-sidecar.jobName"')[2].partition("{{- end -}}")[0]

    assert ".Release.Revision" in name


@EACH_BENCHMARK
def test_nothing_that_tidies_up_nodes_ends_a_benchmark(case: Case) -> None:
    annotations = workload(case.render())["spec"]["template"]["metadata"]["annotations"]

    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    overridden = case.values.get("podAnnotations", {}).get("karpenter.sh/do-not-disrupt")
    assert annotations["karpenter.sh/do-not-disrupt"] == (overridden or "true")


@EACH_BENCHMARK
def test_the_verdict_is_the_termination_message(case: Case) -> None:
    benchmark = container(case.render(), "benchmark")

    assert f"--verdict-file={benchmark['terminationMessagePath']}" in flags(benchmark)
    assert benchmark["terminationMessagePolicy"] == "FallbackToLogsOnError"


@EACH_BENCHMARK
def test_a_policy_comes_with_a_limit_on_growth_unless_that_is_taken_away(case: Case) -> None:
    settings = case.values.get("benchmark", {})
    limits = [flag for flag in flags(container(case.render(), "benchmark")) if "rss-growth" in flag]
    wanted = settings.get("policy") != "off" and settings.get("maxRssGrowth", "8Gi")

    assert limits == (["--max-rss-growth-bytes=8Gi"] if wanted else [])


@EACH_BENCHMARK
def test_the_report_goes_where_it_stays(case: Case) -> None:
    results = case.values.get("benchmark", {}).get("results", {})
    to_file = "existingClaim" in results or results.get("report") == "file"
    benchmark = container(case.render(), "benchmark")

    assert f"--report={'/results/report.json' if to_file else '-'}" in flags(benchmark)
    (mount,) = (mount for mount in benchmark["volumeMounts"] if mount["name"] == "results")
    name = workload(case.render())["metadata"]["name"]
    assert mount.get("subPath") == (name if "existingClaim" in results else None)


@EACH_BENCHMARK
def test_the_report_is_told_of_the_place(case: Case) -> None:
    documents = case.render()
    variables, engine = environment(container(documents, "benchmark")), container(documents, "vllm")

    assert variables["GC_SIDECAR_IMAGE"] == engine["image"]
    assert variables["GC_SIDECAR_ENGINE_ARGS"] == " ".join(engine["args"])
    paths = [
        variables[f"GC_SIDECAR_{name}"]["fieldRef"]["fieldPath"]
        for name in ("NODE", "POD", "NAMESPACE")
    ]
    assert paths == ["spec.nodeName", "metadata.name", "metadata.namespace"]
    assert ("GC_SIDECAR_GPU" in variables) is has_gpus(engine)


@EACH
def test_the_control_listener_stays_on_loopback_unless_it_has_a_token(case: Case) -> None:
    documents = case.render()
    control = case.values.get("sidecar", {}).get("control", {})
    sidecar = container(documents, "gc-sidecar")
    args = sidecar["args"]

    assert f"--host={'0.0.0.0' if control.get('expose') else '127.0.0.1'}" in args
    assert ("GC_SIDECAR_TOKEN_FILE" in environment(sidecar)) is bool(control)
    assert ("control" in [port["name"] for port in sidecar["ports"]]) is bool(control.get("expose"))
    for each in ours(pod(documents)):
        mounted = "control-token" in [mount["name"] for mount in each.get("volumeMounts", [])]
        assert mounted is (bool(control) and each["name"] in ("gc-sidecar", "benchmark"))


@EACH_BENCHMARK
def test_in_a_benchmark_nobody_reaches_the_engine(case: Case) -> None:
    policies = of_kind(case.render(), "NetworkPolicy")
    if case.name == "no NetworkPolicy":
        assert policies == []
        return
    ports = [port["port"] for rule in policies[0]["spec"]["ingress"] for port in rule["ports"]]
    settings = case.values.get("sidecar", {})
    # Its metrics are on the port of everything else: who wants them scraped opens it, to whom `metricsFrom` says.
    engine = [8000] if case.values.get("monitoring", {}).get("podMonitor", {}).get("engine") else []

    assert ports == [settings.get("openPort", 9471), *engine]


def test_pull_secrets_and_scheduling_arrive_as_they_are() -> None:
    for mode in ("benchmark", "serve"):
        found = workload(render({**EVERYTHING, "mode": mode}))
        spec = found["spec"]["template"]["spec"]
        for field in (
            "imagePullSecrets", "serviceAccountName", "nodeSelector", "tolerations", "affinity",
            "topologySpreadConstraints", "priorityClassName", "runtimeClassName", "schedulerName",
        ):  # fmt: skip
            assert spec[field] == EVERYTHING[field], field
        labels = found["metadata"]["labels"]
        assert labels["kueue.x-k8s.io/queue-name"] == "gpus"
        assert labels["kueue.x-k8s.io/priority-class"] == "high"
        assert labels["team"] == "inference"
        assert labels["on"] == "the-workload"
        template_labels = found["spec"]["template"]["metadata"]["labels"]
        assert template_labels["kai.scheduler/queue"] == "gpus"


def test_what_is_extra_comes_last_and_wins() -> None:
    """Kubernetes takes the last of two variables of one name, and a command the last of two flags."""
    documents = render(EVERYTHING)
    engine, benchmark, sidecar = (
        container(documents, name) for name in ("vllm", "benchmark", "gc-sidecar")
    )

    assert engine["args"][-1] == "--served-model-name=bench"
    assert [each["env"][-1]["name"] for each in (engine, benchmark, sidecar)] == [
        "NCCL_DEBUG",
        "A",
        "A",
    ]
    assert flags(benchmark)[-1] == "--kill-after=20s"
    assert "--max-stall-share=0" in flags(benchmark)
    assert environment(engine)["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "HF_TOKEN"}}
    assert environment(benchmark)["HF_TOKEN"] == environment(engine)["HF_TOKEN"]
    assert engine["resources"]["limits"]["rdma/hca"] == "4"


def test_the_client_of_another_image_has_the_sidecar_s_user_and_else_the_engine_s() -> None:
    def user(values: dict[str, Any]) -> int:
        found: int = container(render({"benchmark": values}), "benchmark")["securityContext"][
            "runAsUser"
        ]
        return found

    assert user({}) == 2000
    assert user({"image": {"repository": "aiperf", "tag": "1"}}) == 65532
    assert user({"user": {"uid": 1234, "gid": 0}}) == 1234


@pytest.mark.parametrize("mode", ["benchmark", "serve"])
def test_dev_transport_is_for_benchmarks(mode: str) -> None:
    result = template({"mode": mode, "transport": "dev"})

    assert (result.returncode == 0) is (mode == "benchmark")


@EACH
def test_no_template_is_left_and_no_value_is_empty(case: Case) -> None:
    for each in ours(pod(case.render())):
        for word in [*each.get("command", []), *each.get("args", [])]:
            assert "{{" not in word
            assert not re.search(r"=$|<nil>|<no value>|map\[", word), word
