#!/usr/bin/env bash
# Fetches into .aarch64 what `make aarch64-test` needs: Debian's Python for that machine, which qemu runs, and
# packages from PyPI. torch is 2.10, the last one whose wheel for aarch64 is for CPUs alone.
# As root, on Debian, with qemu-user-static and gcc-aarch64-linux-gnu.
set -euo pipefail
cd "$(dirname "$0")/.."
source deploy/foreign_debian.sh
home=$PWD/.aarch64

python_for_aarch64() {
  local apt archive
  foreign_debian aarch64 "$home/apt"
  apt-get "${apt[@]}" install -y --download-only --no-install-recommends python3.11 libstdc++6 libgomp1
  for archive in "$home"/apt/cache/archives/*.deb; do dpkg-deb -x "$archive" "$home/sysroot"; done
}

packages_for_aarch64() {
  local glibc wheel platforms=()
  for glibc in 28 27 26 17; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
  pip download --quiet --no-deps --only-binary=:all: "${platforms[@]}" --platform manylinux2014_aarch64 \
    --python-version 3.11 --implementation cp --abi cp311 --abi abi3 --abi none --dest "$home/wheels" \
    torch==2.10.0 filelock fsspec jinja2 markupsafe mpmath networkx sympy typing_extensions \
    numpy msgspec pyzmq psutil pytest iniconfig packaging pluggy pygments hypothesis sortedcontainers
  for wheel in "$home"/wheels/*.whl; do python -m zipfile -e "$wheel" "$home/site"; done
}

command -v qemu-aarch64-static aarch64-linux-gnu-gcc >/dev/null ||
  { echo "$0: install qemu-user-static and gcc-aarch64-linux-gnu" >&2 && exit 1; }
rm -rf "$home"
mkdir -p "$home"
python_for_aarch64
packages_for_aarch64
# Python takes what -0 says for its own name, and so starts others of its kind.
cat >"$home/python" <<END
#!/usr/bin/env bash
export PYTHONHOME=$home/sysroot/usr
exec qemu-aarch64-static -L "$home/sysroot" -0 "\$0" "$home/sysroot/usr/bin/python3.11" "\$@"
END
chmod +x "$home/python"
