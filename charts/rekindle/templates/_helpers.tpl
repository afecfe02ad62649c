{{- define "rekindle.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* Name of cluster-scoped objects. Names of namespaces have no dots, so two releases never share one. */ -}}
{{- define "rekindle.clusterName" -}}
{{- printf "%s.%s" .Release.Namespace (include "rekindle.fullname" .) -}}
{{- end -}}

{{- define "rekindle.selector" -}}
app.kubernetes.io/name: rekindle-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "rekindle.labels" -}}
{{ include "rekindle.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "rekindle.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "rekindle.fullname" .) -}}
{{- end -}}

{{- define "rekindle.taskPriorityClass" -}}
{{- if .Values.taskPriorityClass.name -}}
{{- .Values.taskPriorityClass.name -}}
{{- else if .Values.taskPriorityClass.create -}}
{{- printf "%s-task" (include "rekindle.clusterName" .) -}}
{{- end -}}
{{- end -}}

{{- define "rekindle.placeholderPriorityClass" -}}
{{- if .Values.placeholderPriorityClass.name -}}
{{- .Values.placeholderPriorityClass.name -}}
{{- else if .Values.placeholderPriorityClass.create -}}
{{- printf "%s-placeholder" (include "rekindle.clusterName" .) -}}
{{- end -}}
{{- end -}}

{{- /* `value`: the name of the value with the image. */ -}}
{{- define "rekindle.image" -}}
{{- $component := "[a-z0-9]+([._-]+[a-z0-9]+)*" -}}
{{- $host := "([A-Za-z0-9.-]+|\\[[0-9A-Fa-f:]+\\])(:[0-9]+)?/" -}}
{{- if not (regexMatch (printf "^(%s)?%s(/%s)*$" $host $component $component) .image.repository) -}}
{{- fail (printf "%s.repository is %q: write it like registry.example/rekindle/operator, without a tag or digest, which belong in %s.tag" .value .image.repository .value) -}}
{{- end -}}
{{- $tag := .image.tag | default .version -}}
{{- if not (regexMatch "^[A-Za-z0-9_][A-Za-z0-9_.-]*(@sha256:[0-9a-f]{64})?$" $tag) -}}
{{- fail (printf "%s.tag is %q: write it like 0.1.0 or 0.1.0@sha256:..., with 64 hexadecimal digits" .value $tag) -}}
{{- end -}}
{{- printf "%s:%s" .image.repository $tag -}}
{{- end -}}

{{- /* What the operator would refuse at its start: refused by helm. */ -}}
{{- define "rekindle.checkValues" -}}
{{- with .Values.leaderElection -}}
{{- if not (and (lt (float64 .renewSeconds) (float64 .renewDeadlineSeconds)) (lt (float64 .renewDeadlineSeconds) (float64 .leaseSeconds))) -}}
{{- fail (printf "leaderElection: renewSeconds (%v) must be less than renewDeadlineSeconds (%v), and that less than leaseSeconds (%v)" .renewSeconds .renewDeadlineSeconds .leaseSeconds) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "rekindle.watchdogSelector" -}}
app.kubernetes.io/name: rekindle-watchdog
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "rekindle.watchdogLabels" -}}
{{ include "rekindle.watchdogSelector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "rekindle.operatorPriorityClass" -}}
{{- if .Values.priorityClassName -}}
{{- .Values.priorityClassName -}}
{{- else if .Values.operatorPriorityClass.create -}}
{{- printf "%s-operator" (include "rekindle.clusterName" .) -}}
{{- end -}}
{{- end -}}

{{/* A map as "key=value,key=value". */}}
{{- define "rekindle.pairs" -}}
{{- $pairs := list -}}
{{- range $key, $value := . -}}{{- $pairs = append $pairs (printf "%s=%v" $key $value) -}}{{- end -}}
{{- join "," $pairs -}}
{{- end -}}

{{- /* Rules for namespaces with topologies. They include all that the operator grants to coordinators, so
it needs neither `escalate` nor `bind`. */ -}}
{{- define "rekindle.rulesForTopologies" -}}
- apiGroups: [rekindle.dev]
  resources: [streamtopologies]
  verbs: [get, list, watch]
- apiGroups: [rekindle.dev]
  resources: [streamtopologies/status]
  verbs: [get, patch, update]
- apiGroups: [rekindle.dev]
  resources: [streamtopologies/finalizers] # needed to set owner references that block deletion
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [secrets, serviceaccounts] # tokens of topologies, and accounts of coordinators
  verbs: [get, list, watch, create, patch]
- apiGroups: [coordination.k8s.io] # Leases of coordinators
  resources: [leases]
  verbs: [get, list, watch, create, patch, update]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy] # of topologies
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end -}}

{{- /* Rules for its own namespace: its Lease, and its own replicas on lost nodes. */ -}}
{{- define "rekindle.rulesForItself" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io] # delete: OwnerReferencesPermissionEnforcement asks for it to set an owner
  resources: [leases]
  resourceNames: [{{ include "rekindle.fullname" . }}-operator]
  verbs: [get, patch, update, delete]
- apiGroups: [apps] # its own, which the Lease belongs to
  resources: [deployments]
  resourceNames: [{{ include "rekindle.fullname" . }}]
  verbs: [get]
- apiGroups: [""] # RBAC cannot select pods by label
  resources: [pods]
  verbs: [get, delete]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end -}}

{{- /* Cluster-wide read rules: nodes, and all pods, which use their capacity. */ -}}
{{- define "rekindle.rulesForNodes" -}}
- apiGroups: [""]
  resources: [nodes, pods]
  verbs: [get, list, watch]
{{- end -}}
