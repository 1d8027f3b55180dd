"""Names of ARC's augmented puzzles, which say how to undo the augmentation.

TRM: "007bbfb7|||t3|||0412356789". HRM: "007bbfb7_t3_0412356789". t3 is the number of a rotation
or reflection (`deeploop.data.puzzles.symmetries`), and the digit at place c the colour that c
becomes. The name of the task alone stands for no augmentation.
"""

import re
from typing import NamedTuple

import numpy as np

from deeploop.data.puzzles import symmetries

COLOURS = 10
SCHEMES = {"trm": "{}|||t{}|||{}", "hrm": "{}_t{}_{}"}
NAMED = re.compile(r"(.*?)(?:\|\|\|t([0-7])\|\|\||_t([0-7])_)([0-9]{10})", re.S)


class Augmentation(NamedTuple):
    """A rotation or reflection, and an exchange of colours, of a task's grids."""

    task: str
    symmetry: int = 0
    colours: tuple[int, ...] = tuple(range(COLOURS))

    def apply(self, grid: np.ndarray) -> np.ndarray:
        """Transform a grid of colours, uint8 [rows, columns]."""
        return symmetries.transform(np.array(self.colours, np.uint8)[grid], self.symmetry)

    def undo(self, grid: np.ndarray) -> np.ndarray:
        """Return the grid that `apply` turns into the given one."""
        back = np.argsort(self.colours).astype(np.uint8)
        return back[symmetries.undo(grid, self.symmetry)]

    def name(self, scheme: str = "trm") -> str:
        """Write the augmentation as the name of an identifier: of "trm" or "hrm"."""
        digits = "".join(map(str, self.colours))
        return SCHEMES[scheme].format(self.task, self.symmetry, digits)


def parse_name(name: str) -> Augmentation:
    """Read the name of an identifier in either scheme; any other name is a task's own."""
    match = NAMED.fullmatch(name)
    if match is None or len(set(match[4])) < COLOURS:
        return Augmentation(name)
    return Augmentation(match[1], int(match[2] or match[3]), tuple(map(int, match[4])))
