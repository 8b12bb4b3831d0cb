"""The board of a pool on one host: its members are the workers of all hosts, and one driver.

The driver's place is taken by whoever starts this host's workers. Places of workers on other hosts
stay empty here.
"""

from __future__ import annotations

from shm_broadcast import DRIVER_RANK, Board


def create_pool_board(n_workers: int, generation: int, pool: str) -> Board:
    """Make the board for one generation, and take the driver's place, the last one.

    Args:
        n_workers: how many workers the pool has, on all hosts; worker i is member i.
        generation: the generation's number, for whoever looks on.
        pool: its name, likewise; ``""`` if it has none.

    Raises:
        SharedMemoryError: too little memory is free.
    """
    ranks = (*range(n_workers), DRIVER_RANK)
    board = Board.create(n_workers + 1, n_workers, pool or "pool", ranks)
    board.add_place("generation", generation)
    return board
