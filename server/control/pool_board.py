"""The board of a pool on one host: its members are the workers of all hosts, and one driver.

The driver's place is taken by whoever starts this host's workers. Places of workers on other hosts
stay empty here.
"""

from __future__ import annotations

from shm_broadcast import DRIVER_RANK, Board


def create_pool_board(n_workers: int, generation: int) -> Board:
    """Make the board for one generation, and take the driver's place, the last one.

    Args:
        n_workers: how many workers the pool has, on all hosts; worker i is member i.
        generation: the generation's number, for whoever looks on.

    Raises:
        SharedMemoryError: too little memory is free.
    """
    board = Board.create(n_workers + 1, n_workers, "pool", (*range(n_workers), DRIVER_RANK))
    board.add_place("generation", generation)
    return board
