#!/usr/bin/env bash
# Prepare a machine to serve a large model: check disk, driver and limits, and say what to change.
#
#   deploy/provision.sh --disk /srv/models                        check; changes nothing
#   sudo deploy/provision.sh --disk /srv/models --apply           install into /opt/glm-gpu, with the systemd unit
#   sudo deploy/provision.sh --apply --variant cuda12             the same with NVIDIA devices
#
# The checks are those of `glm-gpu doctor`. Exit code 1 when one of them fails, 2 when misused.
set -euo pipefail

source=$(cd "$(dirname "$0")/.." && pwd)
prefix=/opt/glm-gpu
disk=
variant=cpu
apply=no

misused() { echo "provision.sh: $1; deploy/provision.sh [--disk DIR] [--prefix DIR] [--variant cpu|cuda12|cuda13] [--apply]" >&2; exit 2; }

while [ $# -gt 0 ]; do
  case "$1" in
    --apply) apply=yes; shift ;;
    --disk | --prefix | --variant)
      [ $# -gt 1 ] || misused "$1 needs a value"
      printf -v "${1#--}" %s "$2"
      shift 2
      ;;
    *) misused "$1 is no option" ;;
  esac
done
case "$variant" in cpu) extras=serve,hub ;; cuda12 | cuda13) extras="serve,hub,$variant" ;; *) misused "--variant is $variant" ;; esac

run() {
  echo "+ $*"
  if [ "$apply" = yes ]; then "$@"; fi
}

write_unit() { sed "s|/opt/glm-gpu/bin|$prefix/bin|" "$source/deploy/glm-gpu.service" >"$1"; }

if [ "$apply" = yes ] && [ "$(id -u)" != 0 ]; then misused "--apply needs root"; fi
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "provision.sh: $("$python" --version) is too old, expected 3.11 or newer; set PYTHON" >&2; exit 1; }
command -v cc >/dev/null || echo "no C compiler: kernels will run on NumPy, many times slower (apt install gcc python3-dev)"

if [ "$apply" = no ]; then echo "what --apply would do:"; fi
[ -x "$prefix/bin/python" ] || run "$python" -m venv "$prefix"
run "$prefix/bin/pip" install --quiet "$source[$extras]"
run write_unit /etc/systemd/system/glm-gpu.service
[ -e /etc/glm-gpu.env ] || run install -m 600 "$source/deploy/glm-gpu.env" /etc/glm-gpu.env
run install -m 644 "$source/deploy/glm-gpu-hugepages.conf" /etc/tmpfiles.d/glm-gpu-hugepages.conf
run systemd-tmpfiles --create /etc/tmpfiles.d/glm-gpu-hugepages.conf
run systemctl daemon-reload

echo
if [ ! -x "$prefix/bin/glm-gpu" ]; then
  echo "glm-gpu is not installed in $prefix yet, so disk, driver and limits were not checked; run it with --apply"
  exit 0
fi
# With the limits that the unit gives, as far as this shell may raise its own.
ulimit -l unlimited 2>/dev/null || true
ulimit -n 65536 2>/dev/null || true
"$prefix/bin/glm-gpu" doctor ${disk:+--disk "$disk"}
echo
echo "next: name the model in /etc/glm-gpu.env, then systemctl enable --now glm-gpu"
