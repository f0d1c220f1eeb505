{{/* What the schema cannot say: rules between values, and what the binary of this version does not have. */}}
{{- define "omni.validate" -}}
{{- $root := . }}
{{- $v := .Values }}
{{- $binary := include "omni.binary" . | fromJson }}
{{- $sources := list }}
{{- if $v.model.pvc.claimName }}{{ $sources = append $sources "pvc.claimName" }}{{ end }}
{{- if $v.model.hostPath }}{{ $sources = append $sources "hostPath" }}{{ end }}
{{- if $v.model.image.reference }}{{ $sources = append $sources "image.reference" }}{{ end }}
{{- if ne (len $sources) 1 }}
{{- fail (printf "model: set exactly one of pvc.claimName, hostPath, image.reference; %s set" (ternary "none is" (printf "%s are" (join ", " $sources)) (empty $sources))) }}
{{- end }}
{{- if not (has $v.registry.kind $binary.registries) }}
{{- fail (printf "registry.kind: omni %s has no %s registry, only %s" $root.Chart.AppVersion $v.registry.kind (join ", " $binary.registries)) }}
{{- end }}
{{- $etcd := $v.registry.etcd }}
{{- if eq $v.registry.kind "embedded" }}
{{- if gt (int $v.router.replicas) 1 }}
{{- fail "router.replicas: the embedded registry lives in the router, so there is exactly one; registry.kind=etcd allows more" }}
{{- end }}
{{- if $v.router.autoscaling.enabled }}
{{- fail "router.autoscaling.enabled: the embedded registry lives in the router, so there is exactly one; registry.kind=etcd allows more" }}
{{- end }}
{{- if or $etcd.install $etcd.endpoints $etcd.cluster $etcd.tls.secret $etcd.user.name }}
{{- fail "registry.etcd: is set, but registry.kind is embedded" }}
{{- end }}
{{- else }}
{{- if and $etcd.install $etcd.endpoints }}
{{- fail "registry.etcd.endpoints: must be empty when registry.etcd.install is true" }}
{{- end }}
{{- if and $etcd.install (or $etcd.tls.secret $etcd.user.name) }}
{{- fail "registry.etcd.tls, registry.etcd.user: are for an etcd of your own; the one of this chart is closed by its network policy" }}
{{- end }}
{{- if and $etcd.install (not $v.networkPolicy.enabled) }}
{{- fail "registry.etcd.install: needs networkPolicy.enabled, which is all that protects this etcd" }}
{{- end }}
{{- if and $etcd.user.name (not $etcd.user.passwordSecret) }}
{{- fail "registry.etcd.user.passwordSecret: must be set when registry.etcd.user.name is" }}
{{- end }}
{{- if not (or $etcd.install $etcd.endpoints) }}
{{- fail "registry.etcd.endpoints: name at least one, or set registry.etcd.install" }}
{{- end }}
{{- end }}
{{- if gt (int $v.router.autoscaling.minReplicas) (int $v.router.autoscaling.maxReplicas) }}
{{- fail "router.autoscaling.minReplicas: is above maxReplicas" }}
{{- end }}
{{- if not (has $v.transfer.transport $binary.transports) }}
{{- fail (printf "transfer.transport: omni %s moves KV over %s" $root.Chart.AppVersion (join " and " $binary.transports)) }}
{{- end }}
{{- if eq $v.transfer.transport "shm" }}
{{- fail "transfer.transport: shm does not reach from pod to pod; use tcp" }}
{{- end }}
{{- if and $v.rdma.enabled (not (has "rdma" $binary.transports)) }}
{{- fail (printf "rdma.enabled: omni %s moves KV over %s" $root.Chart.AppVersion (join " and " $binary.transports)) }}
{{- end }}
{{- if ne $v.rdma.enabled (eq $v.transfer.transport "rdma") }}
{{- fail "rdma.enabled: goes with transfer.transport=rdma, and only with it" }}
{{- end }}
{{- if ge (int $v.network.ucxPorts.first) (int $v.network.ucxPorts.last) }}
{{- fail "network.ucxPorts.first: must be below network.ucxPorts.last" }}
{{- end }}
{{- if and $v.router.apiKeysSecret (eq $v.tls.mode "none") }}
{{- fail "router.apiKeysSecret: needs tls.mode, because keys do not travel in clear" }}
{{- end }}
{{- if ne $v.tls.mode "none" }}
{{- if and (eq $v.tls.mode "certManager") (not $v.tls.certManager.issuer.name) }}
{{- fail "tls.certManager.issuer.name: must be set when tls.mode is certManager" }}
{{- end }}
{{- if and (eq $v.tls.mode "existingSecret") (not $v.tls.existingSecret) }}
{{- fail "tls.existingSecret: must be set when tls.mode is existingSecret" }}
{{- end }}
{{- end }}
{{- include "omni.validatePools" . }}
{{- end -}}

{{- define "omni.validatePools" -}}
{{- $root := . }}
{{- $binary := include "omni.binary" . | fromJson }}
{{- $seen := dict }}
{{- $roles := dict }}
{{- $kv := dict }}
{{- range $pool := .Values.pools }}
{{- if eq $pool.role "kv" }}{{ $_ := set $kv $pool.name $pool }}{{ end }}
{{- end }}
{{- range $i, $given := .Values.pools }}
{{- $at := printf "pools[%d]" $i }}
{{- $pool := include "omni.mergedPool" (dict "root" $root "pool" $given) | fromYaml }}
{{- if hasKey $seen $pool.name }}
{{- fail (printf "%s.name: %s is used twice" $at $pool.name) }}
{{- end }}
{{- $_ := set $seen $pool.name true }}
{{- $_ := set $roles $pool.role true }}
{{- if and (gt (int $pool.gpus) 0) (not (has "cuda" $binary.devices)) }}
{{- fail (printf "%s.gpus: omni %s computes on the CPU; leave it 0" $at $root.Chart.AppVersion) }}
{{- end }}
{{- if and (eq $pool.role "kv") (or (gt (int $pool.gpus) 0) (gt (int $pool.hosts) 1) $pool.plan) }}
{{- fail (printf "%s: a kv pool has no gpus, hosts or plan" $at) }}
{{- end }}
{{- if and $pool.poolBytes (ne $pool.role "kv") }}
{{- fail (printf "%s.poolBytes: only kv pools have it; of sidecars it is transfer.poolBytes" $at) }}
{{- end }}
{{- $ranks := include "omni.ranks" $pool | int }}
{{- $role := include "omni.role" $pool.role }}
{{- $known := index $binary.settings $role }}
{{- if and (gt $ranks 1) (not (has "plan" $known)) }}
{{- fail (printf "%s.plan: %s of omni %s runs one rank; leave the plan empty" $at $role $root.Chart.AppVersion) }}
{{- end }}
{{- if gt (int $pool.hosts) 1 }}
{{- range $key := list "hosts" "host_index" "leader" }}
{{- if not (has $key $known) }}
{{- fail (printf "%s.hosts: %s of omni %s runs on one host" $at $role $root.Chart.AppVersion) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and (gt (int $pool.gpus) 0) (ne $ranks (mul (int $pool.gpus) (int $pool.hosts) | int)) }}
{{- fail (printf "%s.plan: has %d ranks, but the pool has %d GPUs" $at $ranks (mul (int $pool.gpus) (int $pool.hosts))) }}
{{- end }}
{{- range $key, $_ := $pool.settings }}
{{- if not (has $key $known) }}
{{- fail (printf "%s.settings.%s: omni %s has no such setting" $at $key $role) }}
{{- end }}
{{- end }}
{{- with $pool.kvPool }}
{{- if ne $pool.role "ar" }}
{{- fail (printf "%s.kvPool: only ar pools publish prefixes" $at) }}
{{- end }}
{{- if not (hasKey $kv .) }}
{{- fail (printf "%s.kvPool: there is no kv pool %s" $at .) }}
{{- end }}
{{- if lt (int (default $root.Values.poolDefaults.replicas (index $kv .).replicas)) (int $pool.replicas) }}
{{- fail (printf "%s.kvPool: %s has fewer replicas than this pool, and replica i uses replica i" $at .) }}
{{- end }}
{{- end }}
{{- if $pool.autoscaling.enabled }}
{{- if not $root.Values.keda.prometheusAddress }}
{{- fail (printf "%s.autoscaling.enabled: keda.prometheusAddress must be set" $at) }}
{{- end }}
{{- if gt (int $pool.autoscaling.minReplicas) (int $pool.autoscaling.maxReplicas) }}
{{- fail (printf "%s.autoscaling.minReplicas: is above maxReplicas" $at) }}
{{- end }}
{{- if or (eq $pool.role "kv") $pool.kvPool }}
{{- fail (printf "%s.autoscaling.enabled: pools that are paired by index do not scale" $at) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $role := list "ar" "dit" }}
{{- if not (hasKey $roles $role) }}
{{- fail (printf "pools: there is no pool with role %s, so no image could be made" $role) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A pool over poolDefaults. Argument: root, pool. */}}
{{- define "omni.mergedPool" -}}
{{- mustMergeOverwrite (deepCopy .root.Values.poolDefaults) (deepCopy .pool) | toYaml -}}
{{- end -}}
