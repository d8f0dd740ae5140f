#!/usr/bin/env bash
# Installs what the tests need from the system: a browser for the report's page, Slurm for the launch scripts, and
# network namespaces for the slow node. Does nothing where they are there.
# Usage: system.sh          (as root on Debian or Ubuntu; elsewhere it says what to install and goes on)
set -euo pipefail
say() { echo "[setup] $*"; }
have() {  # have COMMAND...: any of them
  for name in "$@"; do if command -v "$name" >/dev/null || [ -x "/usr/sbin/$name" ]; then return 0; fi; done
  return 1
}

packages=() lost=()
want() {  # want TESTS PACKAGES -- COMMANDS: note the packages unless one of the commands is there
  local tests=$1; shift
  local needed=()
  while [ "$1" != -- ]; do needed+=("$1"); shift; done
  shift
  if have "$@"; then return 0; fi
  packages+=("${needed[@]}")
  lost+=("$tests")
}
want "the report's browser tests" chromium fonts-dejavu-core -- chromium chromium-browser google-chrome
want "the Slurm tests" slurm-wlm munge -- slurmctld
want "the slow-node test" iproute2 -- tc
if [ ${#packages[@]} = 0 ]; then exit 0; fi

why=$(IFS=,; echo "${lost[*]}")
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  say "not installed: ${packages[*]}; without them these are skipped: $why"
  exit 0
fi
say "installing ${packages[*]} for $why"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Debian starts Slurm's and munge's services on installation where there is an init; the tests start their own.
if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    "${packages[@]}"; } >"$log" 2>&1; then
  tail -n 3 "$log"
  say "they could not be installed; skipped: $why"
fi
