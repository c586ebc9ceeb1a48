{{/* ---- names and labels ------------------------------------------------------------------------------------ */}}

{{/* The chart's name, or `nameOverride`; at most 63 characters, as label values must be. */}}
{{- define "pulsar-trio-proxy.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* The prefix of all objects' names: `fullnameOverride`, or the release's name and the chart's. At most 40
     characters, so that the longest suffix of ours, and controllers' suffixes fit into 63 (a CronJob's name: 52). A
     longer one ends in a digest, so that two releases with the same beginning have names of their own. */}}
{{- define "pulsar-trio-proxy.fullname" -}}
{{- $name := include "pulsar-trio-proxy.name" . -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- if gt (len $full) 40 -}}
{{- $digest := printf "%s %s" .Release.Name $full | sha256sum | trunc 8 -}}
{{- $full = printf "%s-%s" ($full | trunc 31 | trimSuffix "-") $digest -}}
{{- end -}}
{{- $full | trimSuffix "-" -}}
{{- end -}}

{{/* The labels by which the proxy's pods are found. They never change: a Deployment's selector cannot. */}}
{{- define "pulsar-trio-proxy.selectorLabels" -}}
app.kubernetes.io/name: {{ include "pulsar-trio-proxy.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: proxy
{{- end -}}

{{/* The labels of the pod of `helm test`. */}}
{{- define "pulsar-trio-proxy.testSelectorLabels" -}}
app.kubernetes.io/name: {{ include "pulsar-trio-proxy.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: test
{{- end -}}

{{/* Labels of every object. Call: include "pulsar-trio-proxy.labels" (list . "proxy") */}}
{{- define "pulsar-trio-proxy.labels" -}}
{{- $root := index . 0 -}}
{{- $labels := dict
  "app.kubernetes.io/name" (include "pulsar-trio-proxy.name" $root)
  "app.kubernetes.io/instance" $root.Release.Name
  "app.kubernetes.io/component" (index . 1)
  "app.kubernetes.io/version" $root.Chart.AppVersion
  "app.kubernetes.io/managed-by" $root.Release.Service
  "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-")
-}}
{{- mergeOverwrite (deepCopy $root.Values.commonLabels) $labels | toYaml -}}
{{- end -}}

{{/* Name, namespace, labels and annotations of an object.
     Call: include "pulsar-trio-proxy.metadata" (dict "root" . "suffix" "-admin" "component" "proxy" "annotations" map) */}}
{{- define "pulsar-trio-proxy.metadata" -}}
name: {{ include "pulsar-trio-proxy.fullname" .root }}{{ .suffix | default "" }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "pulsar-trio-proxy.labels" (list .root (.component | default "proxy")) | nindent 2 }}
{{- range $key, $value := .labels }}
  {{ $key }}: {{ $value | quote }}
{{- end }}
{{- with mergeOverwrite (deepCopy .root.Values.commonAnnotations) (.annotations | default dict) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The service account of the proxy's pods. */}}
{{- define "pulsar-trio-proxy.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "pulsar-trio-proxy.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* An image's reference. Call: include "pulsar-trio-proxy.image" (list . .Values.image) */}}
{{- define "pulsar-trio-proxy.image" -}}
{{- $root := index . 0 -}}{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository ($image.tag | default $root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* ---- the configuration ------------------------------------------------------------------------------------ */}}

{{/* Where secrets are mounted; one folder for each. */}}
{{- define "pulsar-trio-proxy.secretsDirectory" -}}/var/run/secrets/pulsar-trio-proxy{{- end -}}

{{/* The Secret with the listener's certificate: cert-manager's, or one that exists. Empty without TLS. */}}
{{- define "pulsar-trio-proxy.tlsSecret" -}}
{{- if .Values.tls.enabled -}}
{{- .Values.tls.existingSecret | default (printf "%s-tls" (include "pulsar-trio-proxy.fullname" .)) -}}
{{- end -}}
{{- end -}}

{{/* Name and key (JSON) of the Secret with the key by which clients' tokens are checked, or `{}`. */}}
{{- define "pulsar-trio-proxy.tokenKeySecret" -}}
{{- $token := .Values.auth.token -}}
{{- $symmetric := eq $token.algorithm "symmetric" -}}
{{- $secret := dict -}}
{{- if $token.enabled -}}
{{- $derived := printf "%s-token-%s-key" (include "pulsar-trio-proxy.secretsRelease" .) $token.algorithm -}}
{{- $_ := set $secret "name" ($token.keySecret.name | default $derived) -}}
{{- $_ := set $secret "key" ($token.keySecret.key | default (ternary "SECRETKEY" "PUBLICKEY" $symmetric)) -}}
{{- end -}}
{{- $secret | toJson -}}
{{- end -}}

{{/* Name and key (JSON) of the Secret with the proxy's own token for brokers, or `{}`. */}}
{{- define "pulsar-trio-proxy.proxyTokenSecret" -}}
{{- $proxy := .Values.auth.proxyToken -}}
{{- $secret := dict -}}
{{- if $proxy.enabled -}}
{{- $_ := set $secret "name" ($proxy.secret.name | default (printf "%s-token-%s" (include "pulsar-trio-proxy.secretsRelease" .) $proxy.role)) -}}
{{- $_ := set $secret "key" ($proxy.secret.key | default "TOKEN") -}}
{{- end -}}
{{- $secret | toJson -}}
{{- end -}}

{{/* All Secrets that are mounted (JSON list): name of the folder, of the Secret, and its keys (empty: all). */}}
{{- define "pulsar-trio-proxy.secretMounts" -}}
{{- $mounts := list -}}
{{- with include "pulsar-trio-proxy.tlsSecret" . -}}
{{- $mounts = append $mounts (dict "folder" "tls" "secret" . "keys" (list "tls.crt" "tls.key")) -}}
{{- end -}}
{{- if .Values.tls.enabled -}}
{{- range $index, $secret := .Values.tls.certificates -}}
{{- $mounts = append $mounts (dict "folder" (printf "tls-%d" $index) "secret" $secret "keys" (list "tls.crt" "tls.key")) -}}
{{- end -}}
{{- range $folder, $of := dict "client-ca" .Values.tls.clientCa "client-crl" .Values.tls.clientCrl -}}
{{- if $of.secret -}}
{{- $mounts = append $mounts (dict "folder" $folder "secret" $of.secret "keys" (list $of.key)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.http -}}
{{- if and .enabled .existingSecret (not .plain) -}}
{{- $mounts = append $mounts (dict "folder" "http-tls" "secret" .existingSecret "keys" (list "tls.crt" "tls.key")) -}}
{{- end -}}
{{- end -}}
{{- with .Values.brokerTls.ca -}}
{{- if .secret -}}
{{- $mounts = append $mounts (dict "folder" "broker-ca" "secret" .secret "keys" (list .key)) -}}
{{- end -}}
{{- end -}}
{{- with .Values.brokerTls.certificateSecret -}}
{{- $mounts = append $mounts (dict "folder" "broker-tls" "secret" . "keys" (list "tls.crt" "tls.key")) -}}
{{- end -}}
{{- with include "pulsar-trio-proxy.tokenKeySecret" . | fromJson -}}
{{- $mounts = append $mounts (dict "folder" "token-key" "secret" .name "keys" (list .key)) -}}
{{- end -}}
{{- with .Values.auth.denyList -}}
{{- if .secret -}}
{{- $mounts = append $mounts (dict "folder" "deny-list" "secret" .secret "keys" (list .key)) -}}
{{- end -}}
{{- end -}}
{{- with include "pulsar-trio-proxy.proxyTokenSecret" . | fromJson -}}
{{- $mounts = append $mounts (dict "folder" "proxy-token" "secret" .name "keys" (list .key)) -}}
{{- end -}}
{{- if .Values.adminToken.secret -}}
{{- $mounts = append $mounts (dict "folder" "admin-token" "secret" .Values.adminToken.secret "keys" (list .Values.adminToken.key)) -}}
{{- end -}}
{{- $mounts | toJson -}}
{{- end -}}

{{/* The configuration derived from the chart's own values: listeners, files of mounted Secrets, folders. YAML. */}}
{{- define "pulsar-trio-proxy.derivedConfig" -}}
{{- $secrets := include "pulsar-trio-proxy.secretsDirectory" . -}}
{{- $address := .Values.bindAddress -}}
{{- $listeners := list -}}
{{- if or (not .Values.tls.enabled) .Values.tls.keepPlain -}}
{{- $listeners = append $listeners (dict "bind" (printf "%s:%d" $address (int .Values.ports.pulsar))) -}}
{{- end -}}
{{- $tls := dict -}}
{{- if .Values.tls.enabled -}}
{{- $tls = dict "certificate" (printf "%s/tls/tls.crt" $secrets) "key" (printf "%s/tls/tls.key" $secrets) -}}
{{- if .Values.tls.clientCa.secret -}}
{{- $_ := set $tls "client_ca" (printf "%s/client-ca/%s" $secrets .Values.tls.clientCa.key) -}}
{{- end -}}
{{- if .Values.tls.clientCrl.secret -}}
{{- $_ := set $tls "client_crl" (printf "%s/client-crl/%s" $secrets .Values.tls.clientCrl.key) -}}
{{- end -}}
{{- $certificates := list -}}
{{- range $index, $secret := .Values.tls.certificates -}}
{{- $folder := printf "%s/tls-%d" $secrets $index -}}
{{- $certificates = append $certificates (dict "certificate" (printf "%s/tls.crt" $folder) "key" (printf "%s/tls.key" $folder)) -}}
{{- end -}}
{{- range $key, $value := dict "certificates" $certificates "ciphers" .Values.tls.ciphers "groups" .Values.tls.groups -}}
{{- if $value -}}
{{- $_ := set $tls $key $value -}}
{{- end -}}
{{- end -}}
{{- if ne .Values.tls.minimumVersion "1.2" -}}
{{- $_ := set $tls "minimum_version" .Values.tls.minimumVersion -}}
{{- end -}}
{{- if .Values.tls.sessionTickets -}}
{{- $_ := set $tls "session_tickets" true -}}
{{- end -}}
{{- if .Values.tls.requireClientCertificate -}}
{{- $_ := set $tls "require_client_certificate" true -}}
{{- end -}}
{{- $listeners = append $listeners (dict "bind" (printf "%s:%d" $address (int .Values.ports.pulsarssl)) "tls" $tls) -}}
{{- end -}}
{{- if .Values.sni.enabled -}}
{{- $listeners = append $listeners (dict "bind" (printf "%s:%d" $address (int .Values.ports.pulsarsni)) "routing" "sni") -}}
{{- end -}}
{{- $announced := dict -}}
{{- if ne .Values.proxyProtocol.mode "off" -}}
{{- $announced = dict "proxy_protocol" .Values.proxyProtocol.mode "proxy_protocol_sources" .Values.proxyProtocol.sources -}}
{{- range $listener := $listeners -}}
{{- $_ := merge $listener $announced -}}
{{- end -}}
{{- end -}}
{{- $config := dict
  "cluster" (dict "runtime_dir" "/run/pulsar-trio-proxy/cluster")
  "listener" $listeners
  "brokers" (include "pulsar-trio-proxy.derivedBrokers" . | fromYaml)
  "authentication" dict
  "admin" (dict "bind" (printf "%s:%d" $address (int .Values.ports.admin)) "allowed_hosts" (include "pulsar-trio-proxy.adminHosts" . | fromJsonArray))
  "shutdown" (dict "delay_ms" (include "pulsar-trio-proxy.secondsToLeave" . | int | mul 1000))
-}}
{{- with .Values.http -}}
{{- if .enabled -}}
{{- $http := dict "bind" (printf "%s:%d" $address (int $.Values.ports.http)) -}}
{{- $httpTls := omit $tls "session_tickets" -}}
{{- if .existingSecret -}}
{{- $_ := set $httpTls "certificate" (printf "%s/http-tls/tls.crt" $secrets) -}}
{{- $_ := set $httpTls "key" (printf "%s/http-tls/tls.key" $secrets) -}}
{{- end -}}
{{- if and $httpTls (not .plain) -}}
{{- $_ := set $http "tls" $httpTls -}}
{{- end -}}
{{- if .inClientsService -}}
{{- $_ := merge $http $announced -}}
{{- end -}}
{{- $_ := set $config "http_listener" (list $http) -}}
{{- end -}}
{{- end -}}
{{- if .Values.adminToken.secret -}}
{{- $_ := set $config.admin "token_file" (printf "%s/admin-token/%s" $secrets .Values.adminToken.key) -}}
{{- end -}}
{{- $brokerTls := dict -}}
{{- if .Values.brokerTls.ca.secret -}}
{{- $_ := set $brokerTls "trust" (printf "%s/broker-ca/%s" $secrets .Values.brokerTls.ca.key) -}}
{{- end -}}
{{- if .Values.brokerTls.certificateSecret -}}
{{- $_ := set $brokerTls "certificate" (printf "%s/broker-tls/tls.crt" $secrets) -}}
{{- $_ := set $brokerTls "key" (printf "%s/broker-tls/tls.key" $secrets) -}}
{{- end -}}
{{- if $brokerTls -}}
{{- $_ := set $config.brokers "tls" $brokerTls -}}
{{- end -}}
{{- with include "pulsar-trio-proxy.proxyTokenSecret" . | fromJson -}}
{{- $_ := set $config.brokers "credentials" (dict "method" "token" "file" (printf "%s/proxy-token/%s" $secrets .key)) -}}
{{- end -}}
{{- with include "pulsar-trio-proxy.tokenKeySecret" . | fromJson -}}
{{- $key := ternary "secret_key" "public_key" (eq $.Values.auth.token.algorithm "symmetric") -}}
{{- $_ := set $config "authentication" (dict "enabled" true "token" (dict $key (printf "%s/token-key/%s" $secrets .key))) -}}
{{- end -}}
{{- with .Values.auth.denyList -}}
{{- if .secret -}}
{{- $denied := dict "deny_file" (printf "%s/deny-list/%s" $secrets .key) -}}
{{- $_ := set $config "authentication" (merge $denied ($config.authentication | default dict)) -}}
{{- end -}}
{{- end -}}
{{- $config | toYaml -}}
{{- end -}}

{{/* The configuration that is written to proxy.toml: the derived one, and `config` over it. JSON. Made once for a
     rendering and kept in the root, which all templates share: to make it for each took half of a rendering's time. */}}
{{- define "pulsar-trio-proxy.config" -}}
{{- if not (hasKey . "madeConfig") -}}
{{- $derived := include "pulsar-trio-proxy.derivedConfig" . | fromYaml -}}
{{- $_ := mergeOverwrite $derived (deepCopy (.Values.config | default dict)) | toJson | set . "madeConfig" -}}
{{- end -}}
{{- .madeConfig -}}
{{- end -}}

{{/* The configuration with the program's own defaults below it (files/defaults.json is generated). JSON; made once. */}}
{{- define "pulsar-trio-proxy.effectiveConfig" -}}
{{- if not (hasKey . "madeEffectiveConfig") -}}
{{- $defaults := .Files.Get "files/defaults.json" | fromJson -}}
{{- $_ := mergeOverwrite $defaults (include "pulsar-trio-proxy.config" . | fromJson) | toJson | set . "madeEffectiveConfig" -}}
{{- end -}}
{{- .madeEffectiveConfig -}}
{{- end -}}

{{/* Make integers of the whole numbers in a map, in place: Helm's YAML has only floats, TOML distinguishes both. */}}
{{- define "pulsar-trio-proxy.integers" -}}
{{- $map := . -}}
{{- range $key, $value := $map -}}
{{- if kindIs "map" $value -}}
{{- include "pulsar-trio-proxy.integers" $value -}}
{{- else if kindIs "slice" $value -}}
{{- $entries := list -}}
{{- range $entry := $value -}}
{{- $holder := dict "entry" $entry -}}
{{- include "pulsar-trio-proxy.integers" $holder -}}
{{- $entries = append $entries $holder.entry -}}
{{- end -}}
{{- $_ := set $map $key $entries -}}
{{- else if kindIs "float64" $value -}}
{{- if eq (floor $value) $value -}}
{{- $_ := set $map $key (int64 $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A YAML text as TOML; in place of what it cannot express, `toToml` returns the error's text.
     Call: include "pulsar-trio-proxy.toml" (include "pulsar-trio-proxy.config" .) */}}
{{- define "pulsar-trio-proxy.toml" -}}
{{- $tree := fromYaml . -}}
{{- include "pulsar-trio-proxy.integers" $tree -}}
{{- $toml := toToml $tree -}}
{{- if hasKey (fromToml $toml) "Error" -}}
{{- fail (printf "config: TOML cannot express this (%s); remove null from lists" $toml) -}}
{{- end -}}
{{- $toml -}}
{{- end -}}

{{/* "true" if there is a listener for HTTP. */}}
{{- define "pulsar-trio-proxy.hasHttp" -}}
{{- if or .Values.http.enabled (get (.Values.config | default dict) "http_listener") -}}true{{- end -}}
{{- end -}}

{{/* Listeners (JSON list): name of the port, its number, its kind as the name of the Service's port has it, whether clients
     use TLS there, the suffix of their Service's name. The names are those of ports.names; further listeners of a kind get
     a number behind it. Those for HTTP are the last ones. */}}
{{- define "pulsar-trio-proxy.listeners" -}}
{{- $names := .Values.ports.names -}}
{{- $seen := dict -}}
{{- $ports := list -}}
{{- $config := include "pulsar-trio-proxy.config" . | fromJson -}}
{{- if not $config.listener -}}
{{- fail "config.listener: is empty, so no client could connect; leave it out, or name listeners" -}}
{{- end -}}
{{- $separate := ternary "" "-http" .Values.http.inClientsService -}}
{{- range $index, $listener := concat $config.listener ($config.http_listener | default list) -}}
{{- $kind := ternary "pulsarssl" "pulsar" (hasKey . "tls") -}}
{{- if ge $index (len $config.listener) -}}
{{- $kind = "http" -}}
{{- else if eq (.routing | default "pulsar") "sni" -}}
{{- $kind = "pulsarsni" -}}
{{- end -}}
{{- $name := get $names $kind -}}
{{- $service := $kind -}}
{{- $count := add1 (get $seen $kind | default 0) -}}
{{- $_ := set $seen $kind $count -}}
{{- if gt $count 1 -}}
{{- $name = printf "%s-%d" $name $count -}}
{{- $service = printf "%s-%d" $service $count -}}
{{- end -}}
{{- $isHttp := eq $kind "http" -}}
{{- $port := splitList ":" (.bind | default (ternary "0.0.0.0:8081" "0.0.0.0:6650" $isHttp)) | last | int -}}
{{- $tls := or (hasKey . "tls") (eq $kind "pulsarsni") -}}
{{- $ports = append $ports (dict "name" $name "service" $service "port" $port "kind" $kind "tls" $tls "suffix" (ternary $separate "" $isHttp)) -}}
{{- end -}}
{{- $ports | toJson -}}
{{- end -}}

{{/* The listener that `helm test` tries (JSON): the first one of these kinds; {} where there is none.
     Call: include "pulsar-trio-proxy.testedListener" (list $listeners "pulsar" "pulsarssl") */}}
{{- define "pulsar-trio-proxy.testedListener" -}}
{{- $tested := dict -}}
{{- $kinds := rest . -}}
{{- range first . -}}
{{- if and (not $tested) (has .kind $kinds) -}}
{{- $tested = . -}}
{{- end -}}
{{- end -}}
{{- $tested | toJson -}}
{{- end -}}

{{/* Names by which the admin port is asked (JSON list): its Service's, and the Ingress' host. An Ingress without one
     takes all names, and needs adminToken. */}}
{{- define "pulsar-trio-proxy.adminHosts" -}}
{{- $name := printf "%s-admin" (include "pulsar-trio-proxy.fullname" .) -}}
{{- $qualified := printf "%s.%s" $name .Release.Namespace -}}
{{- $hosts := list $name $qualified (printf "%s.svc" $qualified) (printf "%s.svc.%s" $qualified .Values.clusterDomain) -}}
{{- if .Values.ingress.enabled -}}
{{- $hosts = append $hosts (.Values.ingress.hostname | default "*") -}}
{{- end -}}
{{- $hosts | toJson -}}
{{- end -}}

{{/* The number of the admin port. */}}
{{- define "pulsar-trio-proxy.adminPort" -}}
{{- splitList ":" (include "pulsar-trio-proxy.config" . | fromJson).admin.bind | last | int -}}
{{- end -}}

{{/* The seconds that a pod needs at least to its end: a preStop hook's sleep, delay, drain, and 15 for the rest. */}}
{{- define "pulsar-trio-proxy.secondsToEnd" -}}
{{- $config := include "pulsar-trio-proxy.effectiveConfig" . | fromJson -}}
{{- $delay := dig "shutdown" "delay_ms" 0 $config -}}
{{- $sleep := dig "preStop" "sleep" "seconds" 0 .Values.lifecycle | int -}}
{{- add (divf (addf $delay $config.limits.drain_timeout_ms) 1000.0 | ceil | int) $sleep 15 -}}
{{- end -}}

{{/* Digest of the part of the configuration that makes new pods, by `rolloutOnConfigChange`; empty: none. With
     `needed` it is the part that a running process cannot apply (proxy/config/changes.py: changes_that_need_…), and all
     of it if the file is not watched. */}}
{{- define "pulsar-trio-proxy.configDigest" -}}
{{- $config := include "pulsar-trio-proxy.config" . | fromJson -}}
{{- $all := include "pulsar-trio-proxy.effectiveConfig" . | fromJson -}}
{{- $needed := eq .Values.rolloutOnConfigChange "needed" -}}
{{- if or (eq .Values.rolloutOnConfigChange "always") (and $needed (eq (int $all.reload.watch_interval_ms) 0)) -}}
{{- $config | toJson | sha256sum -}}
{{- else if $needed -}}
{{- $listeners := list -}}
{{- range $config.listener -}}
{{- $fixed := list (.bind | default "") (hasKey . "tls") -}}
{{- if eq (.routing | default "pulsar") "sni" -}}
{{- $fixed = append $fixed "sni" -}}
{{- end -}}
{{- $listeners = append $listeners $fixed -}}
{{- end -}}
{{- range $config.http_listener -}}
{{- $listeners = append $listeners (list "http" (.bind | default "") (hasKey . "tls")) -}}
{{- end -}}
{{- $limits := pick $all.limits "max_command_bytes" "max_broker_frame_bytes" -}}
{{- list $config.cluster $listeners $config.admin.bind $all.relay.crash_safe $all.log $limits | toJson | sha256sum -}}
{{- end -}}
{{- end -}}

{{/* ---- pods ------------------------------------------------------------------------------------------------- */}}

{{/* Labels of the proxy's pods. `component: proxy` is the label that monitors and dashboards for apache/pulsar-helm-chart select.
     Versions are not among them: a new chart alone makes no new pods. */}}
{{- define "pulsar-trio-proxy.podLabels" -}}
{{- $labels := include "pulsar-trio-proxy.selectorLabels" . | fromYaml -}}
{{- $labels = mergeOverwrite (deepCopy .Values.commonLabels) $labels (dict "component" "proxy") -}}
{{- mergeOverwrite $labels (deepCopy .Values.podLabels) | toYaml -}}
{{- end -}}

{{/* Deployment's `strategy`: `rollingUpdate` is for the type RollingUpdate alone, and the default has it. YAML. */}}
{{- define "pulsar-trio-proxy.updateStrategy" -}}
{{- if eq .Values.updateStrategy.type "RollingUpdate" -}}
{{- .Values.updateStrategy | toYaml -}}
{{- else -}}
{{- omit .Values.updateStrategy "rollingUpdate" | toYaml -}}
{{- end -}}
{{- end -}}

{{/* Number of pods: `replicaCount`; with autoscaling the Deployment's current number, or nothing if there is none or the
     cluster is not asked (`helm template`). Without the number, Kubernetes uses one pod if Helm set another number before. */}}
{{- define "pulsar-trio-proxy.replicas" -}}
{{- if not (or .Values.autoscaling.enabled .Values.keda.enabled) -}}
{{- .Values.replicaCount -}}
{{- else -}}
{{- $live := lookup "apps/v1" "Deployment" .Release.Namespace (include "pulsar-trio-proxy.fullname" .) -}}
{{- with $live -}}
{{- dig "spec" "replicas" "" . -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Annotations of the proxy's pods, as YAML; may be an empty map. */}}
{{- define "pulsar-trio-proxy.podAnnotations" -}}
{{- $annotations := deepCopy .Values.podAnnotations -}}
{{- with include "pulsar-trio-proxy.configDigest" . -}}
{{- $_ := set $annotations "checksum/config" . -}}
{{- end -}}
{{- $annotations | toYaml -}}
{{- end -}}

{{/* Topology spread constraints (JSON list). Pods of another revision do not count, or a rollout would pile up. */}}
{{- define "pulsar-trio-proxy.topologySpread" -}}
{{- $constraints := list -}}
{{- $selector := include "pulsar-trio-proxy.selectorLabels" . | fromYaml -}}
{{- range $key, $when := dict "topology.kubernetes.io/zone" .Values.topologySpread.zones "kubernetes.io/hostname" .Values.topologySpread.hosts -}}
{{- if $when -}}
{{- $constraints = append $constraints (dict
  "maxSkew" 1
  "topologyKey" $key
  "whenUnsatisfiable" $when
  "labelSelector" (dict "matchLabels" $selector)
  "matchLabelKeys" (list "pod-template-hash")
) -}}
{{- end -}}
{{- end -}}
{{- concat $constraints .Values.topologySpreadConstraints | toJson -}}
{{- end -}}

{{/* Where pods beside the proxy's run. Call: include "pulsar-trio-proxy.placement" (list . .Values.analytics.rollup) */}}
{{- define "pulsar-trio-proxy.placement" -}}
{{- $root := index . 0 -}}{{- $values := index . 1 -}}
dnsPolicy: {{ $root.Values.dnsPolicy }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $root.Values.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with $root.Values.hostAliases }}
hostAliases:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.dnsConfig }}
dnsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* ---- the analytics ---------------------------------------------------------------------------------------- */}}

{{/* The labels by which the receiver's pod is found. */}}
{{- define "pulsar-trio-proxy.receiverSelectorLabels" -}}
app.kubernetes.io/name: {{ include "pulsar-trio-proxy.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: receiver
{{- end -}}

{{/* Secret with the receiver's tokens: the one that is named, or one that the chart makes. */}}
{{- define "pulsar-trio-proxy.receiverTokenSecret" -}}
{{- .Values.analytics.receiver.tokenSecret | default (printf "%s-receiver-token" (include "pulsar-trio-proxy.fullname" .)) -}}
{{- end -}}

{{/* The receiver's configuration: addresses, files and the spool's folder, and `analytics.receiver.config` over it. YAML. */}}
{{- define "pulsar-trio-proxy.receiverConfig" -}}
{{- $receiver := .Values.analytics.receiver -}}
{{- $secrets := include "pulsar-trio-proxy.secretsDirectory" . -}}
{{- $listen := dict "bind" (printf "%s:9291" .Values.bindAddress) -}}
{{- if not $receiver.tlsSecret -}}
{{- $_ := set $listen "insecure" true -}}
{{- else -}}
{{- $_ := set $listen "tls" (dict "certificate" (printf "%s/tls/tls.crt" $secrets) "key" (printf "%s/tls/tls.key" $secrets)) -}}
{{- end -}}
{{- $config := dict
  "listen" $listen
  "spool" (dict "directory" "/data/spool")
  "admin" (dict "bind" (printf "%s:9292" .Values.bindAddress))
-}}
{{- $_ := set $config "authentication" (dict "token_files" (list (printf "%s/tokens/%s" $secrets $receiver.tokenKey))) -}}
{{- mergeOverwrite $config (deepCopy $receiver.config) | toYaml -}}
{{- end -}}
