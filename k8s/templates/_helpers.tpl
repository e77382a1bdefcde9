{{- define "job.labels" -}}
app.kubernetes.io/name: elasticd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "etcd.labels" -}}
app.kubernetes.io/name: etcd
app.kubernetes.io/part-of: elasticd
{{- end }}

{{- define "etcd.endpoints" -}}
{{- if eq .Values.etcd.kind "cluster" -}}
https://etcd-0.etcd:2379,https://etcd-1.etcd:2379,https://etcd-2.etcd:2379
{{- else if eq .Values.etcd.kind "trial" -}}
http://etcd:2379
{{- else -}}
{{ required "etcd.endpoints is empty: with etcd.kind=existing it names your etcd, such as https://etcd.example.com:2379" .Values.etcd.endpoints }}
{{- end -}}
{{- end }}
