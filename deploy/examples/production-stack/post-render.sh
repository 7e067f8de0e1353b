#!/bin/sh
# A post-renderer for Helm: what a chart has rendered comes on standard input, and goes out with the kustomize component
# added to its engines. For charts that have no hook for another container, as the vLLM production-stack's.
set -eu

here=$(cd -P "$(dirname "$0")" && pwd -P)
component=${GC_SIDECAR_COMPONENT:-$here/../../kustomize/component}
# Which Deployments are engines: the label that the production-stack puts there. Its router is none.
selector=${GC_SIDECAR_SELECTOR:-app.kubernetes.io/component=serving-engine}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A copy, for kustomize takes nothing from outside of its directory.
cp -R "$component" "$work/component"
sed "s|labelSelector: [^}]*|labelSelector: $selector|" "$component/kustomization.yaml" >"$work/component/kustomization.yaml"
cat >"$work/rendered.yaml"
cat >"$work/kustomization.yaml" <<'KUSTOMIZATION'
resources: [rendered.yaml]
components: [component]
KUSTOMIZATION

if command -v kustomize >/dev/null; then
    kustomize build "$work" >"$work/out.yaml"
else
    kubectl kustomize "$work" >"$work/out.yaml"
fi
# A selector that meets nothing changes nothing, and nobody would notice.
if ! grep -q /bin/with-agent "$work/out.yaml"; then
    echo "gc-sidecar: this chart has no Deployment with the label $selector (GC_SIDECAR_SELECTOR)" >&2
    exit 1
fi
cat "$work/out.yaml"
