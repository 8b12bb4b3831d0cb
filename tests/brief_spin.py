"""Has OpenMP's threads wait as a pool's workers do; fork servers import it before torch."""

import os

from server.launchers.fork_servers import worker_environment

_NAMES = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
_of_workers = worker_environment(threads=1)
os.environ.update({name: _of_workers[name] for name in _NAMES & _of_workers.keys()})
