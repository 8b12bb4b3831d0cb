#!/usr/bin/env bash
# Builds a release in dist/: source archive and wheels; installs each in a clean environment, uses it there, and
# prints what to upload. `make release` runs it. The changelog must have the version, with a date.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

version=$(sed -n 's/^__version__: Final = "\(.*\)"$/\1/p' shm_broadcast/__init__.py)
grep -qE "^## $version \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$" CHANGELOG.md ||
  { echo "$0: CHANGELOG.md has no entry '## $version (date)'" >&2 && exit 1; }

cat >"$work/use.py" <<'END'
import sys

import group_coordinator
import torch

import coordinator


class Adder:
    def __init__(self, context):
        self.tp = context.groups.tp

    def add(self, x):
        return self.tp.all_reduce(torch.tensor([x])).tolist()


if __name__ == "__main__":
    if coordinator.__version__ != sys.argv[1]:
        sys.exit(f"version {coordinator.__version__} is installed, not {sys.argv[1]}")
    with group_coordinator.WorkerPool(Adder, tp=2) as pool:
        if pool.call("add", 1.5) != [3.0]:
            sys.exit("two workers do not add 1.5 and 1.5")
END

check() { # FILE: installs it without the checkout's packages, and uses it
  local clean=$work/${1##*/}
  python -m venv "$clean"
  "$clean/bin/pip" install -q --disable-pip-version-check -c constraints.txt torch "$1[server]"
  (cd "$work" && "$clean/bin/python" use.py "$version" && "$clean/bin/group-coordinator" --version)
  echo "works: ${1##*/}"
}

check_emulated() { # WHEEL: uses its queue on aarch64, which qemu emulates
  python -m zipfile -e "$1" "$work/emulated"
  PYTHONPATH=$work/emulated:.aarch64/site .aarch64/python -P - <<'END'
from shm_broadcast import MessageQueue

writer = MessageQueue(1, 1)
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
writer.enqueue({"x": [1, 2]})
assert reader.dequeue(timeout=60) == {"x": [1, 2]}
END
  echo "works, emulated: ${1##*/}"
}

mapfile -t made < <(deploy/wheels.sh "$@")
for file in "${made[@]}"; do
  case $file in
    *.tar.gz | *_"$(uname -m)".whl) check "$file" ;;
    *_aarch64.whl)
      if [ -x .aarch64/python ]; then check_emulated "$file"; else echo "not run (make aarch64-setup): $file"; fi
      ;;
  esac
done
echo "To upload: twine upload" "${made[@]#"$PWD/"}"
