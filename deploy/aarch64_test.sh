#!/usr/bin/env bash
# Runs tests on aarch64, emulated by qemu: what the wheel's code does there, not in which order an aarch64
# processor would load and store (this one's order is stricter). `make aarch64-test` runs it, with options for
# pytest, in what aarch64_setup.sh has fetched.
set -euo pipefail
cd "$(dirname "$0")/.."
home=$PWD/.aarch64

mapfile -t made < <(deploy/wheels.sh aarch64)
rm -rf "$home/tree" && mkdir "$home/tree"
tar -xzf "${made[0]}" -C "$home/tree" --strip-components 1
python -m zipfile -e "${made[1]}" "$home/wheel"
for package in shm_broadcast device_comm; do cp "$home/wheel/$package"/*.so "$home/tree/$package"; done
cd "$home/tree"
PYTHONPATH=tests/emulated:$home/site exec "$home/python" -m pytest "$@"
