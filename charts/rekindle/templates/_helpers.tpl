{{- define "rekindle.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
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
{{- .Values.taskPriorityClass.name | default (printf "%s-task" (include "rekindle.fullname" .)) -}}
{{- end -}}

{{- define "rekindle.image" -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .version) -}}
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
{{- printf "%s-operator" (include "rekindle.fullname" .) -}}
{{- end -}}
{{- end -}}

{{/* A map as "key=value,key=value". */}}
{{- define "rekindle.pairs" -}}
{{- $pairs := list -}}
{{- range $key, $value := . -}}{{- $pairs = append $pairs (printf "%s=%v" $key $value) -}}{{- end -}}
{{- join "," $pairs -}}
{{- end -}}
