"""Has OpenMP's threads wait as a pool's workers do; fork servers import it before torch."""

import os

from server.launchers.circumstances import worker_environment

_OF_WORKERS = worker_environment(threads=1)
os.environ.update({name: _OF_WORKERS[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")})
