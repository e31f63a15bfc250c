"""Open packs by the space left in them, and the tightest one that holds n tokens in two find-first-set steps.

The space left is a small integer, so packs of equal space form a stack, and a bitmap of two levels says which
stacks are not empty: words of about sqrt(max_length) bits (Python's integers have any width) and one summary
word. Take, put and fullest cost the same at any number of packs.
"""

from __future__ import annotations

from collections.abc import Iterator


class Residuals:
    """Slots 0..slots-1, each in or out, with `room[slot]` tokens left (0..max_length)."""

    def __init__(self, max_length: int, slots: int):
        self.room = [0] * slots
        self._shift = (max_length.bit_length() + 1) // 2
        self._low = (1 << self._shift) - 1
        self._words = [0] * ((max_length >> self._shift) + 1)
        self._summary = 0
        # A stack is a chain: its top, and of each slot the one below; -1 is the end.
        self._top = [-1] * (max_length + 1)
        self._below = [-1] * slots

    def put(self, slot: int, room: int) -> None:
        """Put a slot in, on top of those with as much room."""
        self.room[slot] = room
        below = self._below[slot] = self._top[room]
        self._top[room] = slot
        if below < 0:
            number = room >> self._shift
            self._words[number] |= 1 << (room & self._low)
            self._summary |= 1 << number

    def take(self, length: int) -> int:
        """Take out the slot with the least room of at least `length`; -1 where there is none."""
        number = length >> self._shift
        word = self._words[number] >> (length & self._low)
        if word:
            room = length + (word & -word).bit_length() - 1
        else:
            rest = self._summary >> (number + 1)
            if not rest:
                return -1
            number += (rest & -rest).bit_length()
            word = self._words[number]
            room = (number << self._shift) + (word & -word).bit_length() - 1
        slot = self._top[room]
        below = self._top[room] = self._below[slot]
        if below < 0:
            self._empty(room)
        return slot

    def walk(self, length: int) -> Iterator[int]:
        """Slots with room for `length`, the tightest first; of equal ones the last put in. Take out none
        meanwhile."""
        number, word = length >> self._shift, 0
        word = self._words[number] >> (length & self._low) << (length & self._low)
        while True:
            while word:
                room = (number << self._shift) + (word & -word).bit_length() - 1
                slot = self._top[room]
                while slot >= 0:
                    yield slot
                    slot = self._below[slot]
                word &= word - 1
            rest = self._summary >> (number + 1)
            if not rest:
                return
            number += (rest & -rest).bit_length()
            word = self._words[number]

    def remove(self, slot: int) -> None:
        """Take out one particular slot."""
        room = self.room[slot]
        above, below = self._top[room], self._below[slot]
        if above == slot:
            self._top[room] = below
            if below < 0:
                self._empty(room)
            return
        while self._below[above] != slot:
            above = self._below[above]
        self._below[above] = below

    def _empty(self, room: int) -> None:
        number = room >> self._shift
        word = self._words[number] = self._words[number] ^ (1 << (room & self._low))
        if not word:
            self._summary ^= 1 << number
