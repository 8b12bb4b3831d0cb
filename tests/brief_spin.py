"""Has OpenMP's threads wait as in a pool's worker; to be imported before torch, as fork servers do."""

import os

from server.launchers.circumstances import worker_environment

_OF_WORKERS = worker_environment(threads=1)
os.environ.update({name: _OF_WORKERS[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")})
