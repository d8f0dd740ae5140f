#!/usr/bin/env bash
# Installs this bundle into a new virtual environment, without a network.
# Usage: bash install.sh ENVIRONMENT      PYTHON=/path/to/python chooses the interpreter (default: the series of the bundle)
# All folders of the bundle (001, 002, ...) must lie beside this file. Every piece is checked before anything is made.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
environment=${1:-}
if [ -z "$environment" ] || [ $# != 1 ]; then sed -n '2,4s/^# //p' "$0" >&2; exit 64; fi
die() { echo "error: $1" >&2; echo "try:   $2" >&2; exit "${3:-1}"; }
read -r series options < "$here/environment"
if [ -e "$environment" ]; then die "$environment is there already" "name a new folder, or remove that one" 64; fi
python=${PYTHON:-python$series}
if ! found=$("$python" -c 'import sys, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
  die "$python does not start, or has no venv module" "PYTHON=/path/to/python$series bash $0 $environment"
fi
if [ "$found" != "$series" ]; then
  die "the bundle is for Python $series, $python is $found" "PYTHON=/path/to/python$series bash $0 $environment"
fi

cd "$here"
if ! sha256sum --quiet --strict --check SHA256SUMS >&2; then
  die "the pieces named above are missing or damaged" "copy them again; nothing was installed"
fi
work=$(mktemp -d)
done_well=0
clean() {
  rm -rf "$work"
  if [ "$done_well" = 0 ]; then rm -rf "$environment"; fi
}
trap clean EXIT
# Whole wheels are linked, those that were cut are put together again in the order of their numbers, not their folders'.
for piece in [0-9]*/*.whl; do if [ -e "$piece" ]; then ln -s "$here/$piece" "$work/"; fi; done
while read -r piece; do name=${piece##*/}; cat "$piece" >> "$work/${name%.part-*}"; done \
  < <(find . -path './[0-9]*/*.whl.part-*' | sort --field-separator=/ --key=3)
cp requirements.txt "$work/"
environment=$(mkdir -p "$environment" && cd "$environment" && pwd)
# shellcheck disable=SC2086  # a list of options
"$python" -m venv --without-pip $options "$environment"
# pip runs out of its own wheel. The hashes in requirements.txt are those of the whole wheels.
pip=("$work"/pip-*.whl)
"$environment/bin/python" "${pip[0]}/pip" install --isolated --quiet --disable-pip-version-check --no-index --no-deps \
  --require-hashes --find-links "$work" --requirement "$work/requirements.txt"
done_well=1
echo "installed: $environment"
if [ -x "$environment/bin/megatron-moe" ]; then "$environment/bin/megatron-moe" doctor; fi
