{{/* The containers, in the order in which they start. */}}

{{/* Writes the directory that the engine loads the agent from, and that `run` lies in. */}}
{{- define "gc-sidecar.installAgent" -}}
name: install-agent
image: {{ include "gc-sidecar.ownImage" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [gc-sidecar, install-agent]
args:
  - /opt/gc-sidecar
  {{- if eq .Values.transport "plugin" }}
  - --endpoint-plugin
  {{- end }}
env:
  - name: NVIDIA_VISIBLE_DEVICES
    value: void
resources:
  {{- include "gc-sidecar.resources" .Values.sidecar.resources | nindent 2 }}
securityContext:
  {{- include "gc-sidecar.securityContext" (dict "root" . "user" .Values.sidecar.user "readOnly" true) | nindent 2 }}
volumeMounts:
  - name: agent
    mountPath: /opt/gc-sidecar
{{- end -}}

{{/* No readiness probe: ours can never take vLLM out of its Service. */}}
{{- define "gc-sidecar.sidecar" -}}
{{- $control := .Values.sidecar.control -}}
name: gc-sidecar
image: {{ include "gc-sidecar.ownImage" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- if include "gc-sidecar.nativeSidecars" . }}
restartPolicy: Always
{{- end }}
command: [gc-sidecar, serve]
args:
  - --host={{ $control.expose | ternary "0.0.0.0" "127.0.0.1" }}
  - --port={{ .Values.sidecar.port }}
  {{- range $control.allowedHosts }}
  - --allowed-host={{ . }}
  {{- end }}
  - --open-host=0.0.0.0
  - --open-port={{ .Values.sidecar.openPort }}
  - --log-level={{ .Values.sidecar.logLevel }}
  {{- if eq .Values.mode "serve" }}
  - --max-maintain-pause-s={{ .Values.sidecar.maxMaintainPauseSeconds }}
  {{- end }}
  {{- range .Values.sidecar.extraArgs }}
  - {{ tpl . $ | quote }}
  {{- end }}
env:
  # As variables, for whoever asks in this container: kubectl exec ... -- gc-sidecar doctor
  - name: GC_SIDECAR_RUN_DIR
    value: /run/gc-sidecar
  {{- if ne .Values.transport "board" }}
  - name: GC_SIDECAR_ENGINE_URL
    value: http://localhost:{{ .Values.vllm.port }}
  {{- end }}
  - name: GC_SIDECAR_URL
    value: http://localhost:{{ .Values.sidecar.port }}
  {{- if $control.existingSecret }}
  - name: GC_SIDECAR_TOKEN_FILE
    value: /etc/gc-sidecar/token
  {{- end }}
  - name: NVIDIA_VISIBLE_DEVICES
    value: void
  {{- with .Values.sidecar.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - name: metrics
    containerPort: {{ .Values.sidecar.openPort }}
    protocol: TCP
  {{- if $control.expose }}
  - name: control
    containerPort: {{ .Values.sidecar.port }}
    protocol: TCP
  {{- end }}
startupProbe:
  httpGet:
    path: /healthz
    port: metrics
  periodSeconds: 1
  timeoutSeconds: 2
  failureThreshold: 60
{{- if eq .Values.mode "serve" }}
livenessProbe:
  httpGet:
    path: /healthz
    port: metrics
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}
resources:
  {{- include "gc-sidecar.resources" .Values.sidecar.resources | nindent 2 }}
securityContext:
  {{- include "gc-sidecar.securityContext" (dict "root" . "user" .Values.sidecar.user "readOnly" true) | nindent 2 }}
volumeMounts:
  - name: run-dir
    mountPath: /run/gc-sidecar
  {{- if $control.existingSecret }}
  - name: control-token
    mountPath: /etc/gc-sidecar
    readOnly: true
  {{- end }}
{{- end -}}

{{- define "gc-sidecar.engineArgs" -}}
- {{ .Values.vllm.model | quote }}
- --port={{ .Values.vllm.port }}
{{- if eq .Values.transport "dev" }}
# Dev mode lets everybody who reaches this port call any method of the workers.
- --host=127.0.0.1
{{- end }}
{{- range .Values.vllm.args }}
- {{ tpl . $ | quote }}
{{- end }}
{{- end -}}

{{- define "gc-sidecar.engine" -}}
{{- $vllm := .Values.vllm -}}
{{- $own := list "gc_sidecar" "lora_filesystem_resolver" "lora_hf_hub_resolver" -}}
name: vllm
image: {{ include "gc-sidecar.engineImage" . }}
imagePullPolicy: {{ $vllm.image.pullPolicy }}
{{- if eq .Values.mode "benchmark" }}
restartPolicy: Always
{{- end }}
command:
  - /opt/gc-sidecar/bin/with-agent
  {{- range $vllm.command }}
  - {{ tpl . $ | quote }}
  {{- end }}
args:
  {{- include "gc-sidecar.engineArgs" . | nindent 2 }}
env:
  - name: GC_SIDECAR_RUN_DIR
    value: /run/gc-sidecar
  {{- if or (eq .Values.transport "plugin") $vllm.plugins }}
  # A list that names plugins shuts out all others, vLLM's own two included.
  - name: VLLM_PLUGINS
    value: {{ concat $own $vllm.plugins | uniq | join "," | quote }}
  {{- end }}
  {{- if eq .Values.transport "dev" }}
  - name: VLLM_SERVER_DEV_MODE
    value: "1"
  {{- end }}
  {{- if not (include "gc-sidecar.engineHasGpus" .) }}
  - name: NVIDIA_VISIBLE_DEVICES
    value: void
  {{- end }}
  {{- include "gc-sidecar.userEnv" $vllm.user.name | nindent 2 }}
  - name: HOME
    value: {{ $vllm.user.home }}
  {{- with include "gc-sidecar.tokenEnv" . }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $vllm.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $vllm.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - name: http
    containerPort: {{ $vllm.port }}
    protocol: TCP
{{- if eq .Values.mode "serve" }}
{{- range $kind := list "startup" "liveness" "readiness" }}
{{ $kind }}Probe:
  httpGet:
    path: /health
    port: http
  {{- toYaml (get $vllm.probes $kind) | nindent 2 }}
{{- end }}
{{- end }}
{{- $resources := deepCopy $vllm.resources -}}
{{- $cache := $vllm.cache -}}
{{- if not (or $cache.existingClaim $cache.volume (hasKey $resources "ephemeral-storage")) -}}
{{- /* A node without room for the model would evict the pod in the middle, and the next one too. */ -}}
{{- $_ := set $resources "ephemeral-storage" $cache.sizeLimit -}}
{{- end -}}
{{- if $vllm.gpu.count -}}
{{- $_ := set $resources $vllm.gpu.resource $vllm.gpu.count -}}
{{- end }}
resources:
  {{- with $vllm.claims }}
  claims:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- include "gc-sidecar.resources" $resources | nindent 2 }}
securityContext:
  {{- include "gc-sidecar.securityContext" (dict "root" . "user" $vllm.user "readOnly" $vllm.readOnlyRootFilesystem "extra" $vllm.securityContext) | nindent 2 }}
volumeMounts:
  - name: agent
    mountPath: /opt/gc-sidecar
    readOnly: true
  - name: run-dir
    mountPath: /run/gc-sidecar
  - name: home
    mountPath: {{ $vllm.user.home }}
  - name: cache
    mountPath: {{ $vllm.user.home }}/.cache
  - name: shm
    mountPath: /dev/shm
  - name: tmp
    mountPath: /tmp
  {{- with $vllm.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Under a uid without a passwd entry, PyTorch fails at import unless one of these is set. */}}
{{- define "gc-sidecar.userEnv" -}}
- name: USER
  value: {{ . }}
- name: LOGNAME
  value: {{ . }}
{{- end -}}

{{- define "gc-sidecar.tokenEnv" -}}
{{- with .Values.vllm.hfToken.existingSecret -}}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.vllm.hfToken.key }}
{{- end -}}
{{- end -}}

{{- define "gc-sidecar.gpuName" -}}
{{- $gpu := .Values.vllm.gpu -}}
{{- if $gpu.count -}}
{{ $gpu.count }} x {{ default $gpu.resource $gpu.product }}
{{- else -}}
{{ default "by resource claim" $gpu.product }}
{{- end -}}
{{- end -}}

{{/* The one main container: it ends the Job. It does not see the run directory. */}}
{{- define "gc-sidecar.benchmark" -}}
{{- $benchmark := .Values.benchmark -}}
{{- $results := $benchmark.results -}}
name: benchmark
image: {{ include "gc-sidecar.benchmarkImage" . }}
imagePullPolicy: {{ empty $benchmark.image.repository | ternary .Values.vllm.image.pullPolicy $benchmark.image.pullPolicy }}
workingDir: {{ $results.mountPath }}
command: [/opt/gc-sidecar/bin/gc-sidecar, run]
args:
  - --url=http://localhost:{{ .Values.sidecar.port }}
  {{- if .Values.sidecar.control.existingSecret }}
  - --token-file=/etc/gc-sidecar/token
  {{- end }}
  - --policy={{ $benchmark.policy }}
  {{- if eq $benchmark.policy "budget" }}
  - --pause-budget={{ $benchmark.pauseBudget }}
  {{- end }}
  {{- with $benchmark.maxPause }}
  - --max-pause={{ . }}
  {{- end }}
  {{- if not (kindIs "invalid" $benchmark.maxStallShare) }}
  - --max-stall-share={{ $benchmark.maxStallShare }}
  {{- end }}
  {{- if $benchmark.requireClean }}
  - --require-clean
  {{- end }}
  {{- if and $benchmark.maxRssGrowth (ne $benchmark.policy "off") }}
  - --max-rss-growth-bytes={{ $benchmark.maxRssGrowth }}
  {{- end }}
  - --lease={{ $benchmark.lease }}
  - --engine-timeout={{ $benchmark.engineTimeout }}
  {{- with $benchmark.timeout }}
  - --timeout={{ . }}
  {{- end }}
  {{- if $benchmark.observeClient }}
  - --observe-client
  {{- end }}
  - --owner={{ default (include "gc-sidecar.jobName" .) $benchmark.owner }}
  - --report={{ include "gc-sidecar.reportsToFile" . | empty | ternary "-" (printf "%s/report.json" $results.mountPath) }}
  - --verdict-file=/dev/termination-log
  {{- range $benchmark.extraArgs }}
  - {{ tpl . $ | quote }}
  {{- end }}
  - --
  {{- range $benchmark.command }}
  - {{ tpl . $ | quote }}
  {{- end }}
env:
  - name: NVIDIA_VISIBLE_DEVICES
    value: void
  # What the report says of the place.
  - name: GC_SIDECAR_IMAGE
    value: {{ include "gc-sidecar.engineImage" . }}
  - name: GC_SIDECAR_ENGINE_ARGS
    value: {{ include "gc-sidecar.engineArgs" . | fromYamlArray | join " " | quote }}
  {{- if include "gc-sidecar.engineHasGpus" . }}
  - name: GC_SIDECAR_GPU
    value: {{ include "gc-sidecar.gpuName" . | quote }}
  {{- end }}
  - name: GC_SIDECAR_NODE
    valueFrom:
      fieldRef:
        fieldPath: spec.nodeName
  - name: GC_SIDECAR_POD
    valueFrom:
      fieldRef:
        fieldPath: metadata.name
  - name: GC_SIDECAR_NAMESPACE
    valueFrom:
      fieldRef:
        fieldPath: metadata.namespace
  {{- include "gc-sidecar.userEnv" .Values.vllm.user.name | nindent 2 }}
  - name: HOME
    value: {{ .Values.vllm.user.home }}
  {{- with include "gc-sidecar.tokenEnv" . }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $benchmark.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $benchmark.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
# The verdict; the end of the log where the command failed before there was one.
terminationMessagePath: /dev/termination-log
terminationMessagePolicy: FallbackToLogsOnError
resources:
  {{- include "gc-sidecar.resources" $benchmark.resources | nindent 2 }}
securityContext:
  {{- include "gc-sidecar.securityContext" (dict "root" . "user" (include "gc-sidecar.benchmarkUser" . | fromJson) "readOnly" $benchmark.readOnlyRootFilesystem "extra" $benchmark.securityContext) | nindent 2 }}
volumeMounts:
  - name: agent
    mountPath: /opt/gc-sidecar
    readOnly: true
  - name: benchmark-home
    mountPath: {{ .Values.vllm.user.home }}
  # The model's tokenizer is there already.
  - name: cache
    mountPath: {{ .Values.vllm.user.home }}/.cache
  - name: benchmark-tmp
    mountPath: /tmp
  - name: results
    mountPath: {{ $results.mountPath }}
    {{- if $results.existingClaim }}
    subPath: {{ include "gc-sidecar.jobName" . }}
    {{- end }}
  {{- if .Values.sidecar.control.existingSecret }}
  - name: control-token
    mountPath: /etc/gc-sidecar
    readOnly: true
  {{- end }}
  {{- with $benchmark.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
