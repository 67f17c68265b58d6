{{/* The agent's configuration, TOML. It is a variable of the container, which nobody can change in
a pod: the pod keeps the one that its version understands, whatever the DaemonSet says by then. */}}
{{- define "bursar.agentConfig" -}}
[resources]
quantum = {{ .Values.gpuMemory.quantum | quote }}
managed-memory-capacity = {{ .Values.gpuMemory.managedPerNode | quote }}
reserved-memory = {{ .Values.gpuMemory.reservedPerGpu | quote }}
{{- with .Values.placement.computeRound }}
compute-round = {{ . | quote }}
{{- end }}

[kubelet]
device-plugin-dir = {{ printf "%s/device-plugins" .Values.node.kubeletDir | quote }}
pod-resources-socket = {{ printf "%s/pod-resources/kubelet.sock" .Values.node.kubeletDir | quote }}
{{- if .Values.relay.enabled }}
relay-dir = {{ printf "%s/relay" .Values.node.runDir | quote }}
{{- end }}

[driver]
root = "/driver-root"
host-root = {{ .Values.driver.root | quote }}
dev-root = {{ .Values.driver.devRoot | quote }}
provisioner-user = {{ int64 .Values.driver.provisionerUser }}
{{- range .Values.driver.extraMounts }}

[[driver.extra-mounts]]
host-path = {{ .hostPath | quote }}
container-path = {{ .containerPath | default .hostPath | quote }}
read-only = {{ if hasKey . "readOnly" }}{{ .readOnly }}{{ else }}true{{ end }}
{{- end }}

[paths]
state-dir = {{ .Values.node.stateDir | quote }}
run-dir = {{ .Values.node.runDir | quote }}
cdi-dir = {{ .Values.node.cdiDir | quote }}

[binding]
wait = {{ .Values.placement.bindingWait | quote }}

[audit]
policy = {{ .Values.audit.policy | quote }}
tolerance = {{ .Values.audit.tolerance | quote }}
process-allowance = {{ .Values.audit.processAllowance | quote }}
kill-after = {{ .Values.audit.killAfter }}
kill-outsiders = {{ .Values.audit.killOutsiders }}
exempt-namespaces = {{ concat (list "kube-system" .Release.Namespace) .Values.policies.exemptNamespaces .Values.policies.refuseUnmanagedGpus.exemptNamespaces | uniq | toJson }}
host-programs = {{ .Values.audit.hostPrograms | toJson }}

[context-policy]
default = {{ .Values.contextPolicy.default | quote }}

[retained-memory]
enabled = {{ .Values.retainedMemory.enabled }}
{{- with .Values.retainedMemory.perGpu }}
per-gpu = {{ . | quote }}
{{- end }}
fdstore-socket = {{ printf "%s/fdstore/fdstore.sock" .Values.node.runDir | quote }}

[sharing]
allow-unscrubbed = {{ .Values.sharing.allowUnscrubbed }}
refuse-beside-other-plugins = {{ .Values.sharing.refuseBesideOtherPlugins }}

[http]
listen = "[::]:{{ .Values.agent.metricsPort }}"
probes = "[::]:{{ .Values.agent.probePort }}"
{{- end }}
