{{/* The labels of every object. */}}
{{- define "bursar.labels" -}}
{{ include "bursar.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The labels that never change. */}}
{{- define "bursar.selector" -}}
app.kubernetes.io/name: bursar
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* An image reference: of (dict "image" ... "root" .). */}}
{{- define "bursar.image" -}}
{{- $registry := .root.Values.global.imageRegistry | default .image.registry -}}
{{- if not (or $registry (regexMatch "^(localhost|[^/]*[.:][^/]*)/" .image.repository)) }}
{{- fail (printf "failed to install Bursar: the image %s has no registry, because no release is published; make a release by docs/internals/release.md, and set global.imageRegistry to its registry" .image.repository) }}
{{- end }}
{{- with $registry }}{{ . }}/{{ end }}{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- with .image.digest }}@{{ . }}{{ end }}
{{- end }}

{{/* The pull secrets of a pod, as a field of its spec. */}}
{{- define "bursar.pullSecrets" -}}
{{- with .Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The prefix of all names: the release's name, with the chart's name in it. */}}
{{- define "bursar.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{/* The name of a part's objects: of (dict "part" "agent" "root" .). */}}
{{- define "bursar.name" -}}
{{ include "bursar.fullname" .root }}-{{ .part }}
{{- end }}

{{/* The name of a part's service account: of (dict "part" "agent" "root" .). */}}
{{- define "bursar.account" -}}
{{- $account := (index .root.Values .part).serviceAccount -}}
{{- if $account.name -}}
{{ $account.name }}
{{- else if $account.create -}}
{{ include "bursar.name" . }}
{{- else -}}
default
{{- end -}}
{{- end }}

{{/* The affinity of agents and fd stores: nodes with a GPU. */}}
{{- define "bursar.gpuNodes" -}}
{{- if .Values.agent.affinity -}}
{{ toYaml .Values.agent.affinity }}
{{- else -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      {{- range .Values.agent.gpuNodeLabels | default (list "") }}
      {{- $parts := splitList "=" . }}
      - matchExpressions:
          {{- if eq (len $parts) 2 }}
          - { key: {{ first $parts }}, operator: In, values: [{{ last $parts | quote }}] }
          {{- else if . }}
          - { key: {{ first $parts }}, operator: Exists }
          {{- end }}
          - { key: bursar.dev/agent, operator: NotIn, values: ["false"] }
      {{- end }}
{{- end -}}
{{- end }}

{{/* The fields of a pod that runs beside the agent, on the same nodes and without its rights. */}}
{{- define "bursar.besideAgent" -}}
# The account has rights of the platform only, such as a security context constraint.
serviceAccountName: {{ include "bursar.account" (dict "part" "agent" "root" .) }}
priorityClassName: {{ .Values.agent.priorityClassName }}
automountServiceAccountToken: false
{{- with include "bursar.pullSecrets" . }}
{{ . }}
{{- end }}
{{- with .Values.agent.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "bursar.gpuNodes" . }}
affinity:
  {{- . | nindent 2 }}
{{- end }}
{{- with .Values.agent.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The security context of a process that owns a folder of root's, and needs no other right. */}}
{{- define "bursar.rootWithoutRights" -}}
# Root owns the folder of the socket, and no other user may enter it. The agent runs as root too.
runAsUser: 0
runAsNonRoot: false
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
seccompProfile: { type: RuntimeDefault }
{{- if .Values.openshift.enabled }}
seLinuxOptions: { type: spc_t }
{{- end }}
{{- end }}

{{/* Not empty where the cluster serves MutatingAdmissionPolicy as v1. */}}
{{- define "bursar.mutates" -}}
{{- $served := .Values.policies.mutatingAdmissionPolicies | toString -}}
{{- if or (eq $served "true") (and (eq $served "auto") (or
  (.Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy")
  (semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version))) -}}
true
{{- end -}}
{{- end }}

{{/* The resource that counts device memory, and the one that counts managed memory. */}}
{{- define "bursar.device" -}}
bursar.dev/gpu-memory-{{ include "bursar.unit" . }}
{{- end }}
{{- define "bursar.managed" -}}
bursar.dev/managed-memory-{{ include "bursar.unit" . }}
{{- end }}
{{/* The resource that counts hundredths of a GPU's compute time. */}}
{{- define "bursar.compute" -}}
bursar.dev/gpu-compute
{{- end }}
{{- define "bursar.unit" -}}
{{ get (dict "1Gi" "gib" "512Mi" "512mib" "256Mi" "256mib") .Values.gpuMemory.quantum }}
{{- end }}

{{/* The bytes of one quantum. */}}
{{- define "bursar.quantum" -}}
{{ get (dict "1Gi" "1073741824" "512Mi" "536870912" "256Mi" "268435456") .Values.gpuMemory.quantum }}
{{- end }}

{{/* CEL: every container of a pod that may request memory. */}}
{{- define "bursar.cel.containers" -}}
object.spec.containers + object.spec.?initContainers.orValue([])
{{- end }}

{{/* CEL: the containers that a request adds: all containers of a created pod, or added ephemeral ones. Existing
containers of a pod may be older than the policy. */}}
{{- define "bursar.cel.added" -}}
oldObject == null ? dyn({{ include "bursar.cel.containers" . }}) : dyn(object.spec.?ephemeralContainers.orValue([])
.filter(c, !oldObject.spec.?ephemeralContainers.orValue([]).exists(o, o.name == c.name)))
{{- end }}

{{/* CEL: a container sets NVIDIA_VISIBLE_DEVICES to a value that may select a GPU. */}}
{{- define "bursar.cel.sees" -}}
c.?env.orValue([]).exists(e, e.name == 'NVIDIA_VISIBLE_DEVICES' && (has(e.valueFrom) || !(e.?value.orValue('') in ['', 'void', 'none'])))
{{- end }}

{{/* Requests that create pods, or add ephemeral containers to a pod. */}}
{{- define "bursar.pods" -}}
- apiGroups: [""]
  apiVersions: [v1]
  operations: [CREATE]
  resources: [pods]
- apiGroups: [""]
  apiVersions: [v1]
  operations: [UPDATE]
  resources: [pods/ephemeralcontainers]
{{- end }}

{{/* CEL: a pod requests GPU memory. */}}
{{- define "bursar.cel.asks" -}}
({{ include "bursar.cel.containers" . }}).exists(c, c.?resources.?limits.orValue({}).exists(r, r in ['{{ include "bursar.device" . }}', '{{ include "bursar.managed" . }}']))
{{- end }}

{{/* The namespaces whose pods a policy matches: of (dict "exempt" [further names] "root" .). */}}
{{- define "bursar.policed" -}}
namespaceSelector:
  matchExpressions:
    - key: kubernetes.io/metadata.name
      operator: NotIn
      values: {{ concat (list "kube-system" .root.Release.Namespace) .root.Values.policies.exemptNamespaces .exempt | uniq | toJson }}
{{- end }}
