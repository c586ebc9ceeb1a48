{{/* Options of `pipeline` (JSON list). */}}
{{- define "pulsar-trio-proxy.pipelineOptions" -}}
{{- $rollup := .Values.analytics.rollup -}}
{{- $options := list "--once" "--spool" "/data/spool" "--tables" $rollup.tables
  "--keep-spool-hours" ($rollup.retention.spoolHours | int | toString)
  "--compact-limit" ($rollup.compactedPartitionsMax | int | toString) -}}
{{- range $table, $days := $rollup.retention.days -}}
{{- $options = concat $options (list "--keep" (printf "%s=%d" $table (int $days))) -}}
{{- end -}}
{{- range $rollup.jobs -}}
{{- $options = concat $options (list "--job" .) -}}
{{- end -}}
{{- $options | toJson -}}
{{- end -}}

{{/* Environment of the pipeline's container and of its executors'. YAML. */}}
{{- define "pulsar-trio-proxy.jobEnvironment" -}}
- name: HOME
  value: /tmp
- name: SPARK_LOCAL_DIRS
  value: /tmp
{{- with .Values.analytics.rollup.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The volume with spool and tables, and the rule that keeps its pods on the receiver's node unless it can be mounted on
     several: pods of one node can share one that is ReadWriteOnce. YAML. */}}
{{- define "pulsar-trio-proxy.dataVolume" -}}
- name: data
  persistentVolumeClaim:
    claimName: {{ .Values.analytics.receiver.persistence.existingClaim | default (printf "data-%s-receiver-0" (include "pulsar-trio-proxy.fullname" .)) }}
{{- end -}}
{{- define "pulsar-trio-proxy.dataAffinity" -}}
{{- if not (has "ReadWriteMany" .Values.analytics.receiver.persistence.accessModes) -}}
affinity:
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "pulsar-trio-proxy.receiverSelectorLabels" . | nindent 12 }}
{{- end -}}
{{- end -}}

{{/* ---- executors in pods of their own ----------------------------------------------------------------------- */}}

{{/* An error for a volume without room for tables beside the spool, and for executors that would not be the ones that the
     values describe. */}}
{{- define "pulsar-trio-proxy.refuseRollup" -}}
{{- $receiver := .Values.analytics.receiver -}}{{- $rollup := .Values.analytics.rollup -}}
{{- $spool := dig "spool" dict $receiver.config -}}
{{- $bytes := addf (get $spool "total_bytes_max" | default 17179869184) (get $spool "free_bytes_min" | default 268435456) -}}
{{- if and $receiver.enabled (not $receiver.persistence.existingClaim) (le (include "pulsar-trio-proxy.quantity" $receiver.persistence.size | float64) $bytes) -}}
{{- fail (printf "analytics.receiver.persistence.size: %s leaves no room beside the spool (spool.total_bytes_max and free_bytes_min are %dMi); raise it, or lower analytics.receiver.config.spool.total_bytes_max" $receiver.persistence.size (divf $bytes 1048576 | ceil | int)) -}}
{{- end -}}
{{- if and $rollup.enabled $rollup.executors.enabled -}}
{{- range $option := list "--master" "--properties-file" -}}
{{- range $argument := $rollup.sparkArguments -}}
{{- if or (eq $argument $option) (hasPrefix (printf "%s=" $option) $argument) -}}
{{- fail (printf "analytics.rollup.sparkArguments: %s would replace what executors in pods need; leave it out" $option) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $kind, $of := $rollup.executors.resources -}}
{{- if hasKey ($of | default dict) "memory" -}}
{{- fail (printf "analytics.rollup.executors.resources.%s.memory: Spark sets it; use analytics.rollup.executors.memory and .memoryOverhead" $kind) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* spark-submit's options (JSON list); `sparkArguments` come last, and so take precedence. */}}
{{- define "pulsar-trio-proxy.sparkArguments" -}}
{{- $rollup := .Values.analytics.rollup -}}
{{- $arguments := list "--master" $rollup.master -}}
{{- if $rollup.executors.enabled -}}
{{- $arguments = list
  "--master" (printf "k8s://%s" $rollup.executors.apiServer)
  "--name" (printf "%s-pipeline" (include "pulsar-trio-proxy.fullname" .))
  "--properties-file" "/job/executors.conf"
  "--conf" "spark.driver.host=$(POD_IP)"
  "--conf" "spark.driver.bindAddress=$(POD_IP)"
  "--conf" "spark.kubernetes.driver.pod.name=$(POD_NAME)"
-}}
{{- end -}}
{{- concat $arguments $rollup.sparkArguments | toJson -}}
{{- end -}}

{{/* Spark's settings for executors in pods, as a file of properties. This pod is the driver: executors reach it by its
     address, so that no Service is needed, and Kubernetes removes them with it. Spark makes a new secret for each job,
     hands it to the executors in their environment, and refuses every peer that does not have it. */}}
{{- define "pulsar-trio-proxy.executorSettings" -}}
{{- $executors := .Values.analytics.rollup.executors -}}
spark.driver.port 7078
spark.blockManager.port 7079
spark.ui.enabled false
spark.authenticate true
spark.network.crypto.enabled true
spark.network.crypto.authEngineVersion 2
spark.network.crypto.cipher AES/GCM/NoPadding
spark.network.crypto.saslFallback false
spark.io.encryption.enabled true
spark.executor.instances {{ int $executors.count }}
spark.executor.cores {{ int $executors.cores }}
spark.executor.memory {{ $executors.memory }}
spark.executor.memoryOverhead {{ $executors.memoryOverhead }}
{{- with dig "requests" "cpu" "" $executors.resources }}
spark.kubernetes.executor.request.cores {{ . }}
{{- end }}
{{- with dig "limits" "cpu" "" $executors.resources }}
spark.kubernetes.executor.limit.cores {{ . }}
{{- end }}
# As many as the jobs take by themselves for so many cores; Spark's 200 are for large clusters.
spark.sql.shuffle.partitions {{ mul 2 $executors.count $executors.cores }}
spark.kubernetes.namespace {{ .Release.Namespace }}
spark.kubernetes.container.image {{ include "pulsar-trio-proxy.image" (list . .Values.analytics.image) }}
spark.kubernetes.container.image.pullPolicy {{ .Values.analytics.image.pullPolicy }}
spark.kubernetes.executor.podTemplateFile /job/executor.yaml
spark.kubernetes.executor.podTemplateContainerName executor
# Without these Spark would need rights on ConfigMaps, Services and claims.
spark.kubernetes.executor.disableConfigMap true
spark.kubernetes.driver.service.deleteOnTermination false
spark.kubernetes.driver.ownPersistentVolumeClaim false
spark.kubernetes.driver.reusePersistentVolumeClaim false
{{- end -}}

{{/* The labels by which executors' pods are found. */}}
{{- define "pulsar-trio-proxy.executorSelectorLabels" -}}
app.kubernetes.io/name: {{ include "pulsar-trio-proxy.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: rollup-executor
{{- end -}}

{{/* The labels by which the rollup's own pod is found. */}}
{{- define "pulsar-trio-proxy.rollupSelectorLabels" -}}
app.kubernetes.io/name: {{ include "pulsar-trio-proxy.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: rollup
{{- end -}}

{{/* Spark's template of an executor's pod; Spark adds image, arguments, memory, CPU and its own labels. */}}
{{- define "pulsar-trio-proxy.executorPod" -}}
{{- $rollup := .Values.analytics.rollup -}}
apiVersion: v1
kind: Pod
metadata:
  labels:
    {{- merge (include "pulsar-trio-proxy.labels" (list . "rollup-executor") | fromYaml) $rollup.podLabels | toYaml | nindent 4 }}
  {{- with $rollup.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  restartPolicy: Never
  # An executor ends with its driver; this is for one that does not notice.
  activeDeadlineSeconds: {{ $rollup.activeDeadlineSeconds }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- include "pulsar-trio-proxy.placement" (list . $rollup) | nindent 2 }}
  {{- with include "pulsar-trio-proxy.dataAffinity" . }}
  {{- . | nindent 2 }}
  {{- end }}
  securityContext:
    {{- toYaml .Values.podSecurityContext | nindent 4 }}
  containers:
    - name: executor
      env:
        {{- include "pulsar-trio-proxy.jobEnvironment" . | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      resources:
        {{- toYaml $rollup.executors.resources | nindent 8 }}
      securityContext:
        {{- toYaml .Values.securityContext | nindent 8 }}
      volumeMounts:
        - name: data
          mountPath: /data
        - name: spark-local-dir-1
          mountPath: /tmp
  volumes:
    {{- include "pulsar-trio-proxy.dataVolume" . | nindent 4 }}
    # By this name Spark knows it as the folder for its files.
    - name: spark-local-dir-1
      emptyDir:
        sizeLimit: {{ $rollup.scratchSize }}
{{- end -}}
