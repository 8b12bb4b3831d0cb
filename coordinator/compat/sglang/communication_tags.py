"""SGLang's tags: messages with one of them meet only receives with the same."""

from enum import IntEnum, unique


@unique
class P2PTag(IntEnum):
    """Numbers for `send_object` and `recv_object`: four ASCII letters, but for the default."""

    DEFAULT = 0
    HICACHE_PP_SYNC = 0x50704869
    GRAMMAR_PP_SYNC = 0x50704772
    DISAGG_BOOTSTRAP_PP_SYNC = 0x50704273
