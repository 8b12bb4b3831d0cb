"""Provide SGLang's message tags: a receive gets only messages with its tag."""

from enum import IntEnum, unique


@unique
class P2PTag(IntEnum):
    """Tags of `send_object` and `recv_object`; except for the default four ASCII letters."""

    DEFAULT = 0
    HICACHE_PP_SYNC = 0x50704869
    GRAMMAR_PP_SYNC = 0x50704772
    DISAGG_BOOTSTRAP_PP_SYNC = 0x50704273
