{{/* The configuration that is checked before an upgrade: all of it, but not a certificate that cert-manager may not have made yet. YAML. */}}
{{- define "pulsar-trio-proxy.checkedConfig" -}}
{{- $config := include "pulsar-trio-proxy.config" . | fromJson -}}
{{- if and .Values.tls.enabled .Values.tls.certManager.enabled -}}
{{- $listeners := list -}}
{{- range $config.listener -}}
{{- $listeners = append $listeners (omit . "tls") -}}
{{- end -}}
{{- $_ := set $config "listener" $listeners -}}
{{- if and .Values.http.enabled (not .Values.http.existingSecret) -}}
{{- $_ := set $config "http_listener" (list (omit (first $config.http_listener) "tls")) -}}
{{- end -}}
{{- end -}}
{{- $config | toYaml -}}
{{- end -}}

{{/* The Secrets that the check mounts (JSON list); all but the one that cert-manager may not have made yet. */}}
{{- define "pulsar-trio-proxy.checkedSecretMounts" -}}
{{- $mounts := list -}}
{{- range include "pulsar-trio-proxy.secretMounts" . | fromJsonArray -}}
{{- if not (and (eq .folder "tls") $.Values.tls.certManager.enabled) -}}
{{- $mounts = append $mounts . -}}
{{- end -}}
{{- end -}}
{{- $mounts | toJson -}}
{{- end -}}

{{/* The mounts of a container that runs the proxy's program. Call: include "pulsar-trio-proxy.mounts" (list . SECRET_MOUNTS) */}}
{{- define "pulsar-trio-proxy.mounts" -}}
{{- $root := index . 0 -}}
- name: config
  mountPath: /etc/pulsar-trio-proxy
  readOnly: true
- name: runtime
  mountPath: /run/pulsar-trio-proxy
- name: tmp
  mountPath: /tmp
{{- range index . 1 | fromJsonArray }}
- name: secret-{{ .folder }}
  mountPath: {{ include "pulsar-trio-proxy.secretsDirectory" $root }}/{{ .folder }}
  readOnly: true
{{- end }}
{{- with include "pulsar-trio-proxy.accountDirectory" $root }}
- name: service-account
  mountPath: {{ . }}
  readOnly: true
{{- end }}
{{- with $root.Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The volumes of a pod that runs the proxy's program. Call: include "pulsar-trio-proxy.volumes" (list . CONFIG_MAP SECRET_MOUNTS) */}}
{{- define "pulsar-trio-proxy.volumes" -}}
{{- $root := index . 0 -}}
- name: config
  configMap:
    name: {{ index . 1 }}
{{- range list "runtime" "tmp" }}
- name: {{ . }}
  emptyDir:
    sizeLimit: {{ $root.Values.volumes.sizeLimit }}
{{- end }}
{{- range index . 2 | fromJsonArray }}
- name: secret-{{ .folder }}
  secret:
    secretName: {{ .secret }}
    defaultMode: 0440
    items:
      {{- range .keys }}
      - key: {{ . }}
        path: {{ . }}
      {{- end }}
{{- end }}
{{- if include "pulsar-trio-proxy.accountDirectory" $root }}
# As Kubernetes would mount it in all containers: here the proxy's alone has it.
- name: service-account
  projected:
    sources:
      - serviceAccountToken:
          path: token
          expirationSeconds: 3607
      - configMap:
          name: kube-root-ca.crt
          items:
            - key: ca.crt
              path: ca.crt
{{- end }}
{{- with $root.Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Where the pod's service-account token is mounted; empty: nowhere, as nothing reads it there. */}}
{{- define "pulsar-trio-proxy.accountDirectory" -}}
{{- $directory := "/var/run/secrets/kubernetes.io/serviceaccount" -}}
{{- with include "pulsar-trio-proxy.kubernetesIssuer" . | fromJson -}}
{{- $token := .token_file | default (printf "%s/token" $directory) -}}
{{- if eq $token (printf "%s/token" $directory) -}}{{- $directory -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* The table `authentication.oidc.kubernetes` where it has an effect (JSON), with `enabled`; else an empty map. */}}
{{- define "pulsar-trio-proxy.kubernetesIssuer" -}}
{{- $authentication := (include "pulsar-trio-proxy.effectiveConfig" . | fromJson).authentication -}}
{{- $oidc := $authentication.oidc | default dict -}}
{{- $found := dict -}}
{{- if and $authentication.enabled (kindIs "map" $oidc.kubernetes) -}}
{{- $found = set (deepCopy $oidc.kubernetes) "enabled" true -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}
