{{/* Names, labels and the small pieces that every workload shares. */}}

{{- define "omni.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "omni.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "omni.name" . -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that never change: selectors are made of these. Argument: root, component, pool (may be empty). */}}
{{- define "omni.selector" -}}
app.kubernetes.io/name: {{ include "omni.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
omni/pool: {{ . }}
{{- end }}
{{- end -}}

{{- define "omni.labels" -}}
{{ include "omni.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: omni
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "omni.image" -}}
{{- $i := .Values.image -}}
{{- if $i.digest -}}
{{ $i.repository }}@{{ $i.digest }}
{{- else -}}
{{ $i.repository }}:{{ default .Chart.AppVersion $i.tag }}
{{- end -}}
{{- end -}}

{{- define "omni.serviceAccount" -}}
{{- $s := .Values.serviceAccount -}}
{{- ternary (default (include "omni.fullname" .) $s.name) (default "default" $s.name) $s.create -}}
{{- end -}}

{{- define "omni.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.security.user }}
runAsGroup: {{ .Values.security.group }}
fsGroup: {{ .Values.security.group }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Argument: whether this container registers memory with an RDMA device. */}}
{{- define "omni.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
  {{- if . }}
  # Registered memory is locked memory.
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}

{{/*
Address that others connect to, for a port. The address of the pod, because a name may still mean the pod's predecessor;
with TLS its name, because certificates hold names. Argument: root, port, pool.
*/}}
{{- define "omni.advertise" -}}
{{- $host := ternary "[$(POD_IP)]" "$(POD_IP)" (eq .root.Values.network.ipFamily "IPv6") -}}
{{- if and (ne .root.Values.tls.mode "none") (ne .pool "router") -}}
{{- $host = printf "$(POD_NAME).%s-%s.%s.svc" (include "omni.fullname" .root) .pool .root.Release.Namespace -}}
{{- end -}}
{{ include "omni.scheme" .root }}://{{ $host }}:{{ .port }}
{{- end -}}

{{- define "omni.listen" -}}
{{ ternary "[::]" "0.0.0.0" (eq .root.Values.network.ipFamily "IPv6") }}:{{ .port }}
{{- end -}}

{{- define "omni.scheme" -}}
{{ ternary "http" "https" (eq .Values.tls.mode "none") }}
{{- end -}}

{{- define "omni.binary" -}}
{{ .Files.Get "files/binary.json" }}
{{- end -}}

{{/*
The environment of a role from a map of settings. A setting that the binary does not have ends the rendering.
Argument: root, role, settings (key to value), field (the value to name in the message).
*/}}
{{- define "omni.env" -}}
{{- $known := index (include "omni.binary" .root | fromJson).settings .role -}}
{{- $role := .role -}}
{{- range $key, $value := .settings }}
{{- if not (has $key $known) }}
{{- fail (printf "omni %s of this version has no setting %s" $role $key) }}
{{- end }}
- name: OMNI_{{ upper $key }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end -}}

{{/* What every role sets. Argument: root, ports (grpc, admin), pool. */}}
{{- define "omni.commonSettings" -}}
listen: {{ include "omni.listen" (dict "root" .root "port" .ports.grpc) | quote }}
admin_listen: {{ include "omni.listen" (dict "root" .root "port" .ports.admin) | quote }}
advertise: {{ include "omni.advertise" (dict "root" .root "port" .ports.grpc "pool" .pool) | quote }}
pool: {{ .pool }}
log_level: {{ .root.Values.log.level | quote }}
log_format: {{ .root.Values.log.format }}
{{- with .root.Values.tracing.endpoint }}
otlp_endpoint: {{ . | quote }}
{{- end }}
{{- if eq .root.Values.tls.mode "none" }}
# In clear is never the default beyond one machine.
tls: "off"
{{- else }}
tls: "on"
tls_cert: /etc/omni/tls/tls.crt
tls_key: /etc/omni/tls/tls.key
tls_ca: /etc/omni/tls/ca.crt
admin_tls: {{ .root.Values.tls.adminPorts | quote }}
{{- end }}
{{- end -}}

{{/* Scheme of the admin ports: http or https. Argument: root. */}}
{{- define "omni.adminScheme" -}}
{{ ternary "http" "https" (or (eq .Values.tls.mode "none") (eq .Values.tls.adminPorts "off")) }}
{{- end -}}

{{/* Where a probe asks. The kubelet checks no certificate and shows none. Argument: root, path, port. */}}
{{- define "omni.probe" -}}
httpGet: {path: {{ .path }}, port: {{ .port }}{{ if eq (include "omni.adminScheme" .root) "https" }}, scheme: HTTPS{{ end }}}
{{- end -}}

{{/* What Prometheus needs to scrape an admin port, in its list of endpoints. Argument: root, port, host (in the certificate). */}}
{{- define "omni.scrapeEndpoint" -}}
- port: {{ .port }}
  path: /metrics
  interval: {{ .root.Values.monitoring.interval }}
  {{- if eq (include "omni.adminScheme" .root) "https" }}
  {{- $t := .root.Values.tls }}
  {{- $secret := ternary $t.existingSecret (printf "%s-monitor-tls" (include "omni.fullname" .root)) (eq $t.mode "existingSecret") }}
  scheme: https
  tlsConfig:
    ca: {secret: {name: {{ $secret }}, key: ca.crt}}
    {{- if eq $t.adminPorts "mutual" }}
    cert: {secret: {name: {{ $secret }}, key: tls.crt}}
    keySecret: {name: {{ $secret }}, key: tls.key}
    {{- end }}
    # Prometheus connects to addresses, and certificates hold names.
    serverName: {{ .host }}
  {{- end }}
{{- end -}}

{{/* Where the members of a pool find the registry. */}}
{{- define "omni.registry" -}}
{{- if eq .Values.registry.kind "etcd" -}}
etcd://{{ include "omni.etcdEndpoints" . }}
{{- else -}}
{{ include "omni.scheme" . }}://{{ include "omni.fullname" . }}-router-internal.{{ .Release.Namespace }}.svc:7600
{{- end -}}
{{- end -}}

{{/* Settings of the registry: where it is, and what etcd needs to know. */}}
{{- define "omni.registrySettings" -}}
registry: {{ include "omni.registry" . | quote }}
{{- if eq .Values.registry.kind "etcd" }}
{{- $e := .Values.registry.etcd }}
# Several releases may share one etcd.
cluster: {{ default (printf "%s-%s" .Release.Namespace (include "omni.fullname" .)) $e.cluster | quote }}
{{- if $e.tls.secret }}
registry_ca: /etc/omni/etcd-tls/ca.crt
{{- if $e.tls.clientCertificate }}
registry_cert: /etc/omni/etcd-tls/tls.crt
registry_key: /etc/omni/etcd-tls/tls.key
{{- end }}
{{- end }}
{{- if $e.user.name }}
registry_user: {{ $e.user.name | quote }}
registry_password_file: /etc/omni/etcd-user/{{ $e.user.passwordKey }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "omni.secretMounts" -}}
{{- if ne .Values.tls.mode "none" }}
- {name: tls, mountPath: /etc/omni/tls, readOnly: true}
{{- end }}
{{- if eq .Values.registry.kind "etcd" }}
{{- if .Values.registry.etcd.tls.secret }}
- {name: etcd-tls, mountPath: /etc/omni/etcd-tls, readOnly: true}
{{- end }}
{{- if .Values.registry.etcd.user.name }}
- {name: etcd-user, mountPath: /etc/omni/etcd-user, readOnly: true}
{{- end }}
{{- end }}
{{- end -}}

{{/* Argument: root, component (whose certificate). */}}
{{- define "omni.secretVolumes" -}}
{{- $v := .root.Values }}
{{- if ne $v.tls.mode "none" }}
- name: tls
  secret:
    secretName: {{ ternary $v.tls.existingSecret (printf "%s-%s-tls" (include "omni.fullname" .root) .component) (eq $v.tls.mode "existingSecret") }}
    defaultMode: 0440
{{- end }}
{{- if eq $v.registry.kind "etcd" }}
{{- with $v.registry.etcd.tls.secret }}
- name: etcd-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- if $v.registry.etcd.user.name }}
- name: etcd-user
  secret: {secretName: {{ $v.registry.etcd.user.passwordSecret }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- end -}}

{{- define "omni.etcdEndpoints" -}}
{{- if .Values.registry.etcd.install -}}
{{ include "omni.fullname" . }}-etcd.{{ .Release.Namespace }}.svc:2379
{{- else -}}
{{ join "," .Values.registry.etcd.endpoints }}
{{- end -}}
{{- end -}}

{{/* Ports of a role. */}}
{{- define "omni.ports" -}}
router: {grpc: 7600, http: 7680, admin: 9600}
kv: {grpc: 7601, admin: 9601}
ar: {grpc: 7602, admin: 9602}
dit: {grpc: 7603, admin: 9603}
{{- end -}}

{{/* Name of the binary's role. */}}
{{- define "omni.role" -}}
{{ index (dict "router" "router" "kv" "kv-transfer" "ar" "ar-stage" "dit" "dit-worker" "admin" "admin" "monitor" "monitor") . }}
{{- end -}}

{{/*
Seconds between the wish to stop a pod and its end: leave the endpoints, finish the longest request, close.
Argument: root, preStopSeconds.
*/}}
{{- define "omni.grace" -}}
{{ add .preStopSeconds .root.Values.requests.longestSeconds .root.Values.requests.marginSeconds }}
{{- end -}}

{{/* Liveness never asks about anything outside the process. Argument: root, port (its name). */}}
{{- define "omni.probes" -}}
readinessProbe:
  {{ include "omni.probe" (dict "root" .root "path" "/readyz" "port" .port) }}
  periodSeconds: 5
  timeoutSeconds: 2
  failureThreshold: 2
livenessProbe:
  {{ include "omni.probe" (dict "root" .root "path" "/livez" "port" .port) }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{/* Placement of pods. Argument: root, spec (nodeSelector, tolerations, ...), selector (text). */}}
{{- define "omni.placement" -}}
{{- with .spec.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- $selector := .selector }}
{{- with .spec.topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  - maxSkew: {{ .maxSkew }}
    topologyKey: {{ .topologyKey }}
    whenUnsatisfiable: {{ .whenUnsatisfiable }}
    labelSelector:
      matchLabels: {{- $selector | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}
