#!/usr/bin/env bash
# Makes a source archive in dist/, and of it a manylinux wheel for each machine named: x86_64, aarch64.
# `make wheels` runs it. A wheel for another machine than this one takes Debian: its cross compiler,
# and apt, which fetches that machine's Python headers into a folder that is gone afterwards.
set -euo pipefail
cd "$(dirname "$0")/.."
source deploy/foreign_debian.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

stop() {
  cat "$work/log" >&2
  echo "$0: $1" >&2
  exit 1
}

headers() { # MACHINE: prints where Python's headers for it are
  local root=$work/headers-$1 apt package
  foreign_debian "$1" "$root"
  package=$(apt-cache "${apt[@]}" --names-only search '^libpython3\.[0-9]+-dev$' | cut -d ' ' -f 1)
  (cd "$root" && apt-get "${apt[@]}" download "$package" >&2 && dpkg-deb -x "$package"_*.deb .)
  echo "-I$root/usr/include/${package:3:-4} -I$root/usr/include"
}

build() { # sdist or wheel, and the folder for it: prints the name of its file
  python -W ignore -c "from setuptools import build_meta as b; print(b.build_$1('$2'))" \
    2>"$work/log" | tail -n 1
}

rm -f group_coordinator.egg-info/SOURCES.txt # or what it names stays in the archive for ever
archive=$PWD/dist/$(build sdist dist) || stop "no source archive could be made"
echo "$archive"

for machine; do
  compiler=cc flags=-Werror
  if [ "$machine" != "$(uname -m)" ]; then
    compiler=$machine-linux-gnu-gcc
    command -v "$compiler" >"$work/log" || stop "no $compiler: install gcc-$machine-linux-gnu"
    found=$(headers "$machine" 2>"$work/log") ||
      stop "Python's headers for $machine could not be fetched"
    flags+=" $found"
  fi
  mkdir "$work/$machine"
  tar -xzf "$archive" -C "$work/$machine" --strip-components 1
  wheel=$(cd "$work/$machine" &&
    _PYTHON_HOST_PLATFORM=linux-$machine CC=$compiler CFLAGS=$flags build wheel "$work")
  [[ $wheel = *-linux_$machine.whl ]] || stop "the extensions do not compile for $machine"
  auditwheel repair -w "$work/repaired" "$work/$wheel" 2>"$work/log" || stop "no manylinux wheel"
  for each in "$work"/repaired/*; do
    mv "$each" dist/
    echo "$PWD/dist/${each##*/}"
  done
done
