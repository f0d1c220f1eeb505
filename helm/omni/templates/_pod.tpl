{{/* Containers and volumes of pools. */}}

{{/* Identity of a pod for its settings; first, because later variables refer to it. */}}
{{- define "omni.podFields" -}}
- name: POD_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
{{- if ne .Values.tls.mode "none" }}
- name: POD_NAME
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
{{- end }}
{{- end -}}

{{/* What UCX needs to know about the pod's network. Argument: root. */}}
{{- define "omni.ucxEnv" -}}
{{- with .Values.network.interface }}
# Else UCX offers other pods the loopback device as well.
- name: UCX_NET_DEVICES
  value: {{ . }}
{{- end }}
# The ports that the network policy opens.
- name: UCX_TCP_PORT_RANGE
  value: "{{ .Values.network.ucxPorts.first }}-{{ .Values.network.ucxPorts.last }}"
{{- end -}}

{{/* Argument: root, name, role (binary), ports, portPrefix. */}}
{{- define "omni.container" -}}
name: {{ .name }}
image: {{ include "omni.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args: [{{ .role }}]
securityContext: {{- include "omni.containerSecurity" (and .root.Values.rdma.enabled (ne .role "router")) | nindent 2 }}
ports:
  - {name: {{ .portPrefix }}grpc, containerPort: {{ .ports.grpc }}}
  {{- with .ports.http }}
  - {name: http, containerPort: {{ . }}}
  {{- end }}
  - {name: {{ .portPrefix }}admin, containerPort: {{ .ports.admin }}}
{{- end -}}

{{/* The KV-transfer container. Argument: root, spec (resources, poolBytes, extraEnv), pool, portPrefix, poolSettings (of a kv pool). */}}
{{- define "omni.kvContainer" -}}
{{- $root := .root }}
{{- $ports := (include "omni.ports" . | fromYaml).kv }}
{{- $settings := include "omni.commonSettings" (dict "root" $root "ports" $ports "pool" .pool) | fromYaml }}
{{- $_ := mustMergeOverwrite $settings (include "omni.registrySettings" $root | fromYaml) }}
{{- $_ := set $settings "transport" $root.Values.transfer.transport }}
{{- $_ := set $settings "pool_bytes" .spec.poolBytes }}
{{- $known := index (include "omni.binary" $root | fromJson).settings "kv-transfer" }}
{{- range $key, $value := $root.Values.transfer.settings }}
{{- if not (has $key $known) }}
{{- fail (printf "transfer.settings.%s: omni kv-transfer has no such setting" $key) }}
{{- end }}
{{- $_ := set $settings $key $value }}
{{- end }}
{{- range $key, $value := .poolSettings }}
{{- $_ := set $settings $key $value }}
{{- end }}
{{- include "omni.container" (dict "root" $root "name" "kv-transfer" "role" "kv-transfer" "ports" $ports "portPrefix" .portPrefix) }}
env:
  {{- include "omni.podFields" $root | nindent 2 }}
  {{- with include "omni.ucxEnv" $root | trim }}{{ nindent 2 . }}{{ end }}
  {{- with include "omni.env" (dict "root" $root "role" "kv-transfer" "settings" $settings) | trim }}{{ nindent 2 . }}{{ end }}
  {{- with .spec.extraEnv }}{{ toYaml . | nindent 2 }}{{ end }}
startupProbe:
  # Not /startupz: that waits for the registry, and a pod is not restarted because something else is missing.
  {{ include "omni.probe" (dict "root" $root "path" "/livez" "port" (printf "%sadmin" .portPrefix)) }}
  periodSeconds: 2
  failureThreshold: 30
{{ include "omni.probes" (dict "root" $root "port" (printf "%sadmin" .portPrefix)) }}
{{- end -}}

{{/* Argument: root, pool (merged with poolDefaults). */}}
{{- define "omni.stageContainer" -}}
{{- $root := .root }}
{{- $pool := .pool }}
{{- $role := include "omni.role" $pool.role }}
{{- $ports := index (include "omni.ports" . | fromYaml) $pool.role }}
{{- $settings := include "omni.commonSettings" (dict "root" $root "ports" $ports "pool" $pool.name) | fromYaml }}
{{- $_ := mustMergeOverwrite $settings (include "omni.registrySettings" $root | fromYaml) }}
{{- $_ := set $settings "transport" $root.Values.transfer.transport }}
{{- $_ := set $settings "model" $root.Values.model.path }}
{{- $_ := set $settings "drain_grace_s" $root.Values.requests.longestSeconds }}
{{- if eq $pool.role "ar" }}
{{- $url := include "omni.advertise" (dict "root" $root "port" 7601 "pool" $pool.name) }}
{{- with $pool.kvPool }}
{{- $service := printf "%s-%s" (include "omni.fullname" $root) . }}
{{- $url = printf "%s://%s-$(POD_INDEX).%s.%s.svc:7601" (include "omni.scheme" $root) $service $service $root.Release.Namespace }}
{{- end }}
{{- $_ := set $settings "kv_transfer" $url }}
{{- end }}
{{- if gt (int $pool.gpus) 0 }}
{{- $_ := set $settings "device" "cuda" }}
{{- end }}
{{- range $key, $value := $pool.settings }}
{{- $_ := set $settings $key $value }}
{{- end }}
{{- if gt (include "omni.ranks" $pool | int) 1 }}
{{- $_ := set $settings "plan" (include "omni.plan" $pool) }}
{{- end }}
{{- if gt (int $pool.hosts) 1 }}
{{- $_ := set $settings "hosts" "$(LWS_GROUP_SIZE)" }}
{{- $_ := set $settings "host_index" "$(LWS_WORKER_INDEX)" }}
{{- $_ := set $settings "leader" "$(LWS_LEADER_ADDRESS):7610" }}
{{- end }}
{{- include "omni.container" (dict "root" $root "name" $role "role" $role "ports" $ports "portPrefix" "") }}
env:
  {{- include "omni.podFields" $root | nindent 2 }}
  {{- if $pool.kvPool }}
  - name: POD_INDEX
    valueFrom:
      fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}
  {{- end }}
  {{- with include "omni.ucxEnv" $root | trim }}{{ nindent 2 . }}{{ end }}
  {{- with include "omni.env" (dict "root" $root "role" $role "settings" $settings) | trim }}{{ nindent 2 . }}{{ end }}
  {{- with $pool.extraEnv }}{{ toYaml . | nindent 2 }}{{ end }}
resources: {{- include "omni.resources" . | nindent 2 }}
startupProbe:
  # Ready for the first time: weights are read and the registry knows this member.
  {{ include "omni.probe" (dict "root" $root "path" "/startupz" "port" "admin") }}
  periodSeconds: 10
  timeoutSeconds: 2
  failureThreshold: {{ div (add $root.Values.model.loadSeconds 9) 10 }}
{{ include "omni.probes" (dict "root" $root "port" "admin") }}
lifecycle:
  preStop:
    sleep: {seconds: {{ $pool.preStopSeconds }}}
volumeMounts:
  - {name: model, mountPath: {{ $root.Values.model.path }}, readOnly: true{{ with $root.Values.model.pvc.subPath }}, subPath: {{ . }}{{ end }}}
  - {name: shm, mountPath: /dev/shm}
  {{- with include "omni.secretMounts" $root | trim }}{{ nindent 2 . }}{{ end }}
  {{- with $pool.extraVolumeMounts }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}

{{/* Resources of a stage, with its GPUs and its RDMA devices. Argument: root, pool. */}}
{{- define "omni.resources" -}}
{{- $resources := deepCopy .pool.resources }}
{{- $devices := dict }}
{{- if gt (int .pool.gpus) 0 }}
{{- $_ := set $devices .root.Values.gpu.resourceName (int .pool.gpus) }}
{{- end }}
{{- if .root.Values.rdma.enabled }}
{{- $_ := set $devices .root.Values.rdma.resourceName (int .root.Values.rdma.count) }}
{{- end }}
{{- range $side := list "requests" "limits" }}
{{- $_ := set $resources $side (merge (deepCopy $devices) (default dict (index $resources $side))) }}
{{- end }}
{{- toYaml $resources }}
{{- end -}}

{{/* Ranks of a plan. */}}
{{- define "omni.ranks" -}}
{{- $p := .plan -}}
{{ mul (default 1 $p.pp) (default 1 $p.cfg) (default 1 $p.ring) (default 1 $p.ulysses) (default 1 $p.tp) }}
{{- end -}}

{{/* A plan as the binary reads it: axes larger than one, then what experts are spread over. */}}
{{- define "omni.plan" -}}
{{- $plan := .plan -}}
{{- $parts := list -}}
{{- range list "pp" "cfg" "ring" "ulysses" "tp" -}}
{{- if gt (int (default 1 (index $plan .))) 1 -}}
{{- $parts = append $parts (printf "%s=%d" . (int (index $plan .))) -}}
{{- end -}}
{{- end -}}
{{- with $plan.ep -}}
{{- $parts = append $parts (printf "ep=%s" (join "+" .)) -}}
{{- end -}}
{{ join "," $parts }}
{{- end -}}

{{/* Where the checkpoint comes from. */}}
{{- define "omni.modelVolume" -}}
name: model
{{- $m := .Values.model }}
{{- if $m.pvc.claimName }}
persistentVolumeClaim: {claimName: {{ $m.pvc.claimName }}, readOnly: true}
{{- else if $m.hostPath }}
hostPath: {path: {{ $m.hostPath }}, type: Directory}
{{- else }}
image: {reference: {{ $m.image.reference }}, pullPolicy: {{ $m.image.pullPolicy }}}
{{- end }}
{{- end -}}

{{/* The pod of a pool. Argument: root, pool. */}}
{{- define "omni.poolPod" -}}
{{- $root := .root }}
{{- $pool := .pool }}
{{- $selector := include "omni.selector" (dict "root" $root "component" $pool.role "pool" $pool.name) }}
metadata:
  labels: {{- include "omni.labels" (dict "root" $root "component" $pool.role "pool" $pool.name) | nindent 4 }}
  {{- with $pool.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "omni.serviceAccount" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "omni.grace" (dict "root" $root "preStopSeconds" $pool.preStopSeconds) }}
  securityContext: {{- include "omni.podSecurity" $root | nindent 4 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "omni.placement" (dict "spec" $pool "selector" $selector) | trim }}{{ nindent 2 . }}{{ end }}
  {{- if and (eq $pool.role "ar") (not $pool.kvPool) }}
  initContainers:
    # A sidecar: up before the stage, down after it, so that a published prefix outlives the stage's last request.
    - {{ include "omni.kvContainer" (dict "root" $root "spec" $root.Values.transfer "pool" $pool.name "portPrefix" "kv-") | trim | nindent 6 | trim }}
      restartPolicy: Always
      resources: {{- toYaml $root.Values.transfer.resources | nindent 8 }}
      volumeMounts:
        - {name: shm, mountPath: /dev/shm}
        {{- with include "omni.secretMounts" $root | trim }}{{ nindent 8 . }}{{ end }}
  {{- end }}
  containers:
    {{- if eq $pool.role "kv" }}
    - {{ include "omni.kvContainer" (dict "root" $root "spec" (merge (dict "poolBytes" (default $root.Values.transfer.poolBytes $pool.poolBytes)) $pool) "pool" $pool.name "portPrefix" "" "poolSettings" $pool.settings) | trim | nindent 6 | trim }}
      resources: {{- include "omni.resources" . | nindent 8 }}
      lifecycle:
        preStop:
          sleep: {seconds: {{ $pool.preStopSeconds }}}
      volumeMounts:
        - {name: shm, mountPath: /dev/shm}
        {{- with include "omni.secretMounts" $root | trim }}{{ nindent 8 . }}{{ end }}
        {{- with $pool.extraVolumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
    {{- else }}
    - {{ include "omni.stageContainer" . | trim | nindent 6 | trim }}
    {{- end }}
  volumes:
    {{- if ne $pool.role "kv" }}
    - {{ include "omni.modelVolume" $root | trim | nindent 6 | trim }}
    {{- end }}
    # Counts as memory of the pod.
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $pool.shmSize }}}
    {{- with include "omni.secretVolumes" (dict "root" $root "component" $pool.name) | trim }}{{ nindent 4 . }}{{ end }}
    {{- with $pool.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}
