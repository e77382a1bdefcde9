#!/bin/sh
# Certificates for trying TLS between elasticd and etcd. For production use your own authorities (in Kubernetes
# cert-manager, see k8s/README.md).
#
#   deploy/certs.sh [--job JOB]... [--keep-key] DIR HOST_OR_ADDRESS...   # etcd's hosts, besides localhost
#   deploy/certs.sh --job JOB DIR                                       # for another job, after --keep-key
#
# Writes into DIR
#   ca.crt             the authority that signs the certificates of etcd's clients and server
#   server.crt, .key   the certificate that etcd presents to its clients
#   client.crt, .key   a client named elasticd, for an etcd without roles
#   root.crt, .key     a client named root, which makes the roles: see `elasticd etcd-role`
#   job-JOB.crt, .key  a client named JOB, for the nodes of that job alone
#   peer-ca.crt, peer.crt, peer.key   for connections between etcd's members, from an authority of their own
#
# The key of ca.crt is kept as ca.key only with --keep-key. The key of peer-ca.crt is never kept.
# Days of validity: DAYS (30).
set -eu

usage() {
  echo "usage: $0 [--job JOB]... [--keep-key] DIR HOST_OR_ADDRESS..." >&2
  exit 2
}

jobs=
keep=
while [ $# -gt 0 ]; do
  case $1 in
    --job) [ $# -gt 1 ] || usage
      case $2 in
        root | elasticd | etcd) echo "$0: a certificate named $2 would not be a job's own: call the job otherwise" >&2 && exit 2 ;;
        "" | -* | *[!A-Za-z0-9._-]*)
          echo "$0: --job '$2' is no name for a certificate: letters, digits, and . _ - within" >&2 && exit 2 ;;
      esac
      [ ${#2} -le 64 ] || { echo "$0: --job $2 is longer than the 64 characters that a certificate takes" >&2; exit 2; }
      jobs="$jobs $2"
      shift 2 ;;
    --keep-key) keep=yes && shift ;;
    -*) usage ;;
    *) break ;;
  esac
done
[ $# -ge 1 ] || usage
dir=$1
shift
days=${DAYS:-30}
umask 077
mkdir -p "$dir"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

new_key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1"; }

# authority FILE SUBJECT: its certificate into DIR, its key stays in $work
authority() {
  new_key "$work/$1.key"
  openssl req -x509 -new -key "$work/$1.key" -sha256 -days "$days" -subj "/CN=$2" \
    -addext "keyUsage=critical,keyCertSign,cRLSign" -out "$dir/$1.crt"
}

# issue AUTHORITY NAME SUBJECT EXTENSIONS
issue() {
  new_key "$dir/$2.key"
  printf '%s\n' "basicConstraints=critical,CA:FALSE" "keyUsage=critical,digitalSignature" "$4" > "$work/$2.ext"
  openssl req -new -key "$dir/$2.key" -subj "/CN=$3" -out "$work/$2.csr"
  openssl x509 -req -in "$work/$2.csr" -CA "$dir/$1.crt" -CAkey "$work/$1.key" -CAserial "$work/$1.srl" -CAcreateserial \
    -sha256 -days "$days" -extfile "$work/$2.ext" -out "$dir/$2.crt" 2> "$work/log" || { cat "$work/log" >&2; exit 1; }
}

issue_jobs() { for job in $jobs; do issue ca "job-$job" "$job" "extendedKeyUsage=clientAuth"; done; }

if [ -n "$jobs" ] && [ $# -eq 0 ] && [ -e "$dir/ca.crt" ]; then
  [ -e "$dir/ca.key" ] || { echo "$0: $dir/ca.key was not kept: make all again, with --keep-key" >&2; exit 2; }
  cp "$dir/ca.key" "$work/ca.key"
  issue_jobs
  echo "$dir: certificates for$jobs, valid for $days days"
  exit
fi

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

rm -f "$dir/ca.key" # the key of a previous authority
authority ca "elasticd try-out"
authority peer-ca "elasticd try-out, etcd's members"
# A member of etcd is also a client of the other members.
for name in "ca server" "peer-ca peer"; do
  # shellcheck disable=SC2086  # two words
  issue $name etcd "extendedKeyUsage=serverAuth,clientAuth
subjectAltName=$names"
done
issue ca client elasticd "extendedKeyUsage=clientAuth"
issue ca root root "extendedKeyUsage=clientAuth"
issue_jobs
[ -z "$keep" ] || cp "$work/ca.key" "$dir/ca.key"
echo "$dir: $(cd "$dir" && echo *), for $names, valid for $days days"
