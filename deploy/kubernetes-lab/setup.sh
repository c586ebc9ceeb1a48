#!/usr/bin/env bash
# setup.sh: builds the programs for cluster.sh, once (about 10 minutes on 2 idle cores with cold caches, 10 GB of Go's build
# cache). Needs root, Debian, Go, gcc, cgroups of version 1. Everything is kept in $K8S_LAB, ~/.cache/kubernetes-lab by default.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd); WORK=${K8S_LAB:-$HOME/.cache/kubernetes-lab}; BIN=$WORK/bin
. "$HERE/common.sh"; needs_cgroup_v1
mkdir -p "$BIN" "$WORK/images"; export CGO_ENABLED=0 GOFLAGS=-trimpath GOBIN=$BIN
command -v containerd >/dev/null && command -v buildah >/dev/null && command -v mmdebstrap >/dev/null ||
  { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq containerd runc containernetworking-plugins iptables conntrack ethtool buildah mmdebstrap; }
V=v1.36.3; LD="-s -w -X k8s.io/component-base/version.gitVersion=$V -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=36 -X k8s.io/client-go/pkg/version.gitVersion=$V"
for c in kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl kube-proxy; do
  [ -x "$BIN/$c" ] || (cd "$HERE/kubernetes" && go build -ldflags "$LD" -o "$BIN/$c" "k8s.io/kubernetes/cmd/$c" && echo "built $c")
done
[ -x "$BIN/etcd" ] || (cd "$HERE/etcd" && go build -ldflags "-s -w" -o "$BIN/etcd" . && echo "built etcd")
for m in helm.sh/helm/v4/cmd/helm@v4.3.1; do
  b=${m%@*}; [ -x "$BIN/${b##*/}" ] || { go install -ldflags "-s -w" "$m"; echo "built ${b##*/}"; }
done
[ -e "$WORK/images/pause.image.tar" ] || { t=$(mktemp -d); gcc -static -O2 -o "$t/pause" "$HERE/pause.c"
  c=$(buildah from scratch); buildah add -q "$c" "$t/pause" /pause >/dev/null; buildah config --entrypoint '["/pause"]' "$c"
  buildah commit -q "$c" lab.local/pause:1 >/dev/null; buildah rm "$c" >/dev/null
  buildah push -q lab.local/pause:1 "docker-archive:$WORK/images/pause.image.tar:lab.local/pause:1"; rm -rf "$t"; }
echo "ready: $WORK"
