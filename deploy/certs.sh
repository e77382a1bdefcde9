#!/bin/sh
# Certificates for trying TLS between elasticd and etcd: an authority, a server's, a client's. For production use
# your own authority (in Kubernetes cert-manager, see k8s/README.md).
#
#   deploy/certs.sh DIR HOST_OR_ADDRESS...     # where etcd is reached; localhost is always among them
#
# Writes ca.crt, server.crt, server.key, client.crt and client.key into DIR. The authority's key is not kept: run it
# again for other hosts. Days of validity: DAYS (30).
set -eu

if [ $# -lt 1 ]; then
  echo "usage: $0 DIR HOST_OR_ADDRESS..." >&2
  exit 2
fi
dir=$1
shift
days=${DAYS:-30}
umask 077
mkdir -p "$dir"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

names=DNS:localhost,IP:127.0.0.1,IP:0:0:0:0:0:0:0:1
for host in "$@"; do
  case $host in
    *:* | *[!0-9.]*) ;;
    *) names="$names,IP:$host" && continue ;;
  esac
  case $host in
    *:*) names="$names,IP:$host" ;;
    *) names="$names,DNS:$host" ;;
  esac
done

new_key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1"; }

new_key "$work/ca.key"
openssl req -x509 -new -key "$work/ca.key" -sha256 -days "$days" -subj "/CN=elasticd try-out" \
  -addext "keyUsage=critical,keyCertSign,cRLSign" -out "$dir/ca.crt"

# issue NAME SUBJECT EXTENSIONS
issue() {
  new_key "$dir/$1.key"
  printf '%s\n' "basicConstraints=critical,CA:FALSE" "keyUsage=critical,digitalSignature" "$3" > "$work/$1.ext"
  openssl req -new -key "$dir/$1.key" -subj "/CN=$2" -out "$work/$1.csr"
  openssl x509 -req -in "$work/$1.csr" -CA "$dir/ca.crt" -CAkey "$work/ca.key" -CAserial "$work/ca.srl" -CAcreateserial -sha256 \
    -days "$days" -extfile "$work/$1.ext" -out "$dir/$1.crt" 2> "$work/log" || { cat "$work/log" >&2; exit 1; }
}

# An etcd is a client too, of its own members.
issue server etcd "extendedKeyUsage=serverAuth,clientAuth
subjectAltName=$names"
issue client elasticd "extendedKeyUsage=clientAuth"
echo "$dir: ca.crt, server.crt, server.key, client.crt, client.key, for $names, valid for $days days"
