"""The block pool: which blocks of the cache are free, and which sequences share which.

A full block of prompt tokens is known by all tokens up to its end (its key). A prompt that begins like an earlier one
takes those blocks over instead of computing them again: they are counted, and written by nobody since they are full.
(vLLM's automatic prefix caching, as a chain of keys.)
"""

from __future__ import annotations

from dataclasses import dataclass, field


class OutOfBlocks(RuntimeError):
    """The pool has no free block."""


class BlockPool:
    """Blocks 0 .. num_blocks - 1 with reference counts."""

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._users = [0] * num_blocks
        self._by_prefix: dict[tuple[int, ...], int] = {}
        self._prefix_of: dict[int, tuple[int, ...]] = {}

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_shared(self) -> int:
        """Blocks that more than one sequence reads."""
        return sum(users > 1 for users in self._users)

    def allocate(self) -> int:
        """A free block, with one user. Raises OutOfBlocks."""
        if not self._free:
            raise OutOfBlocks(f"all {self.num_blocks} blocks of {self.block_size} tokens are in use")
        block = self._free.pop()
        self._users[block] = 1
        return block

    def release(self, block: int) -> None:
        """One user fewer; the last one gives the block back."""
        if self._users[block] == 0:
            raise ValueError(f"release: block is {block}, takes a block in use")
        self._users[block] -= 1
        if self._users[block] == 0:
            prefix = self._prefix_of.pop(block, None)
            if prefix is not None:
                del self._by_prefix[prefix]
            self._free.append(block)

    def share(self, prefix: tuple[int, ...]) -> int | None:
        """The block that ends with `prefix`, with one more user; None if no sequence has it."""
        block = self._by_prefix.get(prefix)
        if block is not None:
            self._users[block] += 1
        return block

    def publish(self, prefix: tuple[int, ...], block: int) -> None:
        """Let others share a block that is full and whose tokens, with all before them, are `prefix`."""
        if prefix not in self._by_prefix:
            self._by_prefix[prefix] = block
            self._prefix_of[block] = prefix


@dataclass
class Sequence:
    """Tokens of one request and the blocks that hold their keys and values."""

    pool: BlockPool
    tokens: list[int]
    prompt_length: int
    cached: int = 0  # tokens whose keys and values are in the cache
    blocks: list[int] = field(default_factory=list)

    @classmethod
    def start(cls, pool: BlockPool, prompt: list[int]) -> Sequence:
        """A sequence that takes over the blocks of an earlier one's equal beginning. The last prompt token is always
        computed: its logits are wanted.
        """
        sequence = cls(pool, list(prompt), len(prompt))
        size = pool.block_size
        for end in range(size, len(prompt), size):
            block = pool.share(tuple(prompt[:end]))
            if block is None:
                break
            sequence.blocks.append(block)
            sequence.cached = end
        return sequence

    def reserve(self, length: int) -> None:
        """Blocks for the first `length` tokens."""
        while len(self.blocks) * self.pool.block_size < length:
            self.blocks.append(self.pool.allocate())

    def slot(self, position: int) -> int:
        """Where the cache keeps the token at `position`."""
        size = self.pool.block_size
        return self.blocks[position // size] * size + position % size

    def publish(self) -> None:
        """Offer the full blocks of the prompt to later sequences."""
        size = self.pool.block_size
        for i in range(min(self.cached, self.prompt_length) // size):
            self.pool.publish(tuple(self.tokens[: (i + 1) * size]), self.blocks[i])

    def release(self) -> None:
        """Give all blocks back."""
        for block in self.blocks:
            self.pool.release(block)
        self.blocks = []
