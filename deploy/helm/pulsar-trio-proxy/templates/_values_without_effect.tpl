{{/* The values that have no effect with what else is set, as YAML: path, and the condition under which they have one. A
     path stands for all below it. No row is needed for what is below a table with `enabled: false`, except where it has
     an effect nevertheless: there an empty condition stands. Call: (list . $effectiveConfig $listeners) */}}
{{- define "pulsar-trio-proxy.valuesWithoutEffect" -}}
{{- $root := index . 0 -}}{{- $config := index . 1 -}}{{- $listeners := index . 2 -}}
{{- $own := $root.Values.config | default dict -}}
{{- $kinds := dict -}}
{{- range $listeners -}}
{{- $_ := set $kinds .kind true -}}
{{- end -}}
{{- $tested := include "pulsar-trio-proxy.testedListener" (list $listeners "pulsar" "pulsarssl") | fromJson -}}
{{- with $root.Values }}
{{- if .image.digest }}
image.tag: image.digest is empty
{{- end }}
{{- if dig "admin" "bind" "" $own }}
ports.admin: config.admin.bind is not set
{{- if and $own.listener (not .analytics.receiver.enabled) (not .http.enabled) }}
bindAddress: config.listener or config.admin.bind is not set
{{- end }}
{{- end }}
{{- if $own.listener }}
ports.pulsar: config.listener is not set
ports.pulsarssl: config.listener is not set
ports.pulsarsni: config.listener is not set
{{- end }}
{{- if not $kinds.pulsar }}
{{- if not $own.listener }}
ports.pulsar: tls.keepPlain is true
{{- end }}
ports.names.pulsar: a listener is plain (tls.keepPlain)
service.ports.pulsar: a listener is plain (tls.keepPlain)
{{- end }}
{{- if not $kinds.pulsarssl }}
{{- if not $own.listener }}
ports.pulsarssl: tls.enabled is true
{{- end }}
ports.names.pulsarssl: a listener has TLS (tls.enabled)
service.ports.pulsarssl: a listener has TLS (tls.enabled)
{{- end }}
{{- if not $kinds.pulsarsni }}
{{- if not $own.listener }}
ports.pulsarsni: sni.enabled is true
{{- end }}
ports.names.pulsarsni: a listener has routing sni (sni.enabled)
service.ports.pulsarsni: a listener has routing sni (sni.enabled)
{{- end }}
{{- if not .http.enabled }}
ports.http: {{ ternary "config.http_listener is not set" "http.enabled is true" (not (empty $own.http_listener)) }}
{{- end }}
{{- if $kinds.http }}
{{- if not .http.enabled }}
http: ""
http.existingSecret: http.enabled is true
http.plain: http.enabled is true
{{- else if not .tls.enabled }}
http.plain: tls.enabled is true
{{- else if .http.plain }}
http.existingSecret: http.plain is false
{{- end }}
{{- if not (or .http.ingress.enabled .gateway.httpRoutes) }}
http.paths: http.ingress.enabled is true, or gateway.httpRoutes is set
{{- end }}
{{- else }}
ports.names.http: there is a listener for HTTP (http.enabled)
service.ports.http: there is a listener for HTTP (http.enabled)
networkPolicy.http: there is a listener for HTTP (http.enabled)
{{- end }}
{{- if not .gateway.tcpRoutes }}
gateway.versions.tcpRoute: gateway.tcpRoutes is set
{{- end }}
{{- if not .gateway.tlsRoutes }}
gateway.versions.tlsRoute: gateway.tlsRoutes is set
{{- end }}
{{- if not (or .gateway.httpRoutes .gateway.tcpRoutes .gateway.tlsRoutes) }}
gateway.annotations: gateway.httpRoutes, gateway.tcpRoutes or gateway.tlsRoutes is set
{{- end }}
{{- if not .tls.clientCa.secret }}
tls.clientCa.key: tls.clientCa.secret is set
tls.clientCrl.secret: tls.clientCa.secret is set
{{- end }}
{{- if not .tls.clientCrl.secret }}
tls.clientCrl.key: tls.clientCrl.secret is set
{{- end }}
{{- if ne .tls.minimumVersion "1.2" }}
tls.ciphers: tls.minimumVersion is 1.2
{{- end }}
{{- $webTls := hasPrefix "https:" $config.brokers.web_service_url }}
{{- range include "pulsar-trio-proxy.furtherWebUrls" $config | fromJsonArray }}
{{- $webTls = or $webTls (hasPrefix "https:" .) }}
{{- end }}
{{- if not (or $webTls (hasPrefix "pulsar+ssl" $config.brokers.service_url)) }}
brokerTls: config.brokers.service_url begins with pulsar+ssl, or config.brokers.web_service_url with https
{{- else if not .brokerTls.ca.secret }}
brokerTls.ca.key: brokerTls.ca.secret is set
{{- end }}
{{- $namesSecrets := or (and .auth.token.enabled (not .auth.token.keySecret.name)) (and .auth.proxyToken.enabled (not .auth.proxyToken.secret.name)) }}
{{- $ownUrl := dig "brokers" "service_url" "" $own }}
{{- if not (or $namesSecrets (not (or $ownUrl .brokers.pulsarRelease))) }}
auth.pulsarRelease: auth.token or auth.proxyToken is enabled and names no Secret of its own, or it names the brokers
{{- end }}
{{- if and $ownUrl (or .auth.pulsarRelease (not $namesSecrets)) }}
brokers.pulsarRelease: config.brokers.service_url is not set
{{- end }}
{{- if .auth.proxyToken.secret.name }}
auth.proxyToken.role: auth.proxyToken.secret.name is empty
{{- end }}
{{- if $config.authentication.enabled }}
auth.proxyToken.withoutClientAuthentication: clients need no authentication (auth.token, config.authentication)
{{- end }}
{{- if not .auth.denyList.secret }}
auth.denyList.key: auth.denyList.secret is set
{{- end }}
{{- if not .adminToken.secret }}
adminToken.key: adminToken.secret is set
{{- end }}
{{- if or .autoscaling.enabled .keda.enabled }}
replicaCount: autoscaling.enabled and keda.enabled are false (else autoscaling.minReplicas and .maxReplicas count)
{{- end }}
{{- if .keda.enabled }}
autoscaling: ""
autoscaling.cpu: autoscaling.enabled is true
autoscaling.connections: autoscaling.enabled is true
autoscaling.metrics: autoscaling.enabled is true
{{- end }}
{{- if eq .workload.kind "DaemonSet" }}
replicaCount: workload.kind is Deployment
progressDeadlineSeconds: workload.kind is Deployment
updateStrategy: workload.kind is Deployment (workload.daemonSet.updateStrategy)
topologySpread: workload.kind is Deployment
topologySpreadConstraints: workload.kind is Deployment
{{- if .workload.daemonSet.hostNetwork }}
networkPolicy.clients: workload.daemonSet.hostNetwork is false; the nodes' firewall decides
networkPolicy.http: workload.daemonSet.hostNetwork is false; the nodes' firewall decides
networkPolicy.egress: workload.daemonSet.hostNetwork is false; the nodes' firewall decides
networkPolicy.egressMode: workload.daemonSet.hostNetwork is false; the nodes' firewall decides
{{- if not .analytics.receiver.enabled }}
networkPolicy.admin: workload.daemonSet.hostNetwork is false; the nodes' firewall decides
{{- end }}
{{- end }}
{{- else }}
workload.daemonSet: workload.kind is DaemonSet
{{- end }}
{{- if not .autoscaling.connections.targetAverage }}
autoscaling.connections.metric: autoscaling.connections.targetAverage is set
{{- end }}
{{- if ne .updateStrategy.type "RollingUpdate" }}
updateStrategy.rollingUpdate: updateStrategy.type is RollingUpdate
{{- end }}
{{- if not .serviceAccount.create }}
serviceAccount.annotations: serviceAccount.create is true
{{- end }}
{{- if eq .proxyProtocol.mode "off" }}
proxyProtocol.sources: proxyProtocol.mode is optional or required
{{- end }}
{{- if eq .service.type "ClusterIP" }}
service.nodePorts: service.type is NodePort or LoadBalancer
service.externalTrafficPolicy: service.type is NodePort or LoadBalancer
{{- else }}
{{- if not $kinds.pulsar }}
service.nodePorts.pulsar: a listener is plain (tls.keepPlain)
{{- end }}
{{- if not $kinds.pulsarssl }}
service.nodePorts.pulsarssl: a listener has TLS (tls.enabled)
{{- end }}
{{- if not $kinds.pulsarsni }}
service.nodePorts.pulsarsni: a listener has routing sni (sni.enabled)
{{- end }}
{{- if not (and $kinds.http .http.inClientsService) }}
service.nodePorts.http: there is a listener for HTTP, and http.inClientsService is true
{{- end }}
{{- end }}
{{- if not (and (eq .service.type "LoadBalancer") (include "pulsar-trio-proxy.onlyLocal" $root)) }}
service.healthCheck: service.type is LoadBalancer with externalTrafficPolicy Local
service.healthCheckNodePort: service.type is LoadBalancer with externalTrafficPolicy Local
{{- end }}
{{- if ne .service.type "LoadBalancer" }}
service.allocateLoadBalancerNodePorts: service.type is LoadBalancer
service.loadBalancerClass: service.type is LoadBalancer
service.loadBalancerIP: service.type is LoadBalancer
service.loadBalancerSourceRanges: service.type is LoadBalancer
{{- end }}
{{- if and .analytics.receiver.enabled .analytics.receiver.serviceMonitor (not .serviceMonitor.enabled) }}
serviceMonitor: ""
serviceMonitor.relabelings: serviceMonitor.enabled is true
serviceMonitor.metricRelabelings: serviceMonitor.enabled is true
{{- end }}
{{- if not .test.tokenSecret }}
test.tokenKey: test.tokenSecret is set
{{- end }}
{{- if not $tested }}
test: a listener has another routing than sni
{{- end }}
{{- $http := include "pulsar-trio-proxy.testedListener" (list $listeners "http") | fromJson -}}
{{- if not $http }}
test.http: there is a listener for HTTP (http.enabled)
{{- end }}
{{- if not (or $tested.tls (and .test.http $http.tls)) }}
test.caSecret: the first listener has TLS (tls.enabled)
test.caKey: the first listener has TLS (tls.enabled)
test.clientCertificateSecret: the first listener has TLS (tls.enabled)
{{- else if not (or .test.caSecret .tls.enabled) }}
test.caKey: test.caSecret is set
{{- end }}
{{- if not .analytics.receiver.enabled }}
analytics.image: analytics.receiver.enabled is true
{{- else if .analytics.image.digest }}
analytics.image.tag: analytics.image.digest is empty
{{- end }}
{{- if ne .networkPolicy.egressMode "configured" }}
networkPolicy.egress: networkPolicy.egressMode is configured
{{- end }}
{{- if not .networkPolicy.enabled }}
analytics.receiver.peers: networkPolicy.enabled is true
{{- end }}
{{- if .analytics.receiver.persistence.existingClaim }}
analytics.receiver.persistence.size: analytics.receiver.persistence.existingClaim is empty
analytics.receiver.persistence.storageClassName: analytics.receiver.persistence.existingClaim is empty
{{- if not .analytics.rollup.enabled }}
analytics.receiver.persistence.accessModes: analytics.receiver.persistence.existingClaim is empty, or analytics.rollup.enabled is true
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* An error for the first value that differs from the chart's default and has no effect. Calls itself for each table.
     Call: (dict "path" "" "values" map "defaults" map "conditions" map "unmet" "the condition above this table") */}}
{{- define "pulsar-trio-proxy.refuseValuesWithoutEffect" -}}
{{- $switch := "" -}}
{{- if and $.path (not (get $.values "enabled" | default (not (hasKey $.values "enabled")))) (not (hasKey $.conditions $.path)) -}}
{{- $switch = printf "%s.enabled is true" $.path -}}
{{- end -}}
{{- range $key, $value := $.values -}}
{{- $path := printf "%s.%s" $.path $key | trimPrefix "." -}}
{{- $default := get $.defaults $key -}}
{{- $unmet := $.unmet | default (ternary "" $switch (eq $key "enabled")) | default (get $.conditions $path) -}}
{{- if and (kindIs "map" $value) (kindIs "map" $default) $default -}}
{{- include "pulsar-trio-proxy.refuseValuesWithoutEffect" (dict "path" $path "values" $value "defaults" $default "conditions" $.conditions "unmet" $unmet) -}}
{{- else if and $unmet (ne (toJson $value) (toJson $default)) -}}
{{- fail (printf "%s: has no effect unless %s; change that, or leave %s out" $path $unmet $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}
