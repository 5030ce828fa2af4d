"""What do all pictures share? Sizes, colours that survive colour-blindness and grey print, and a figure to draw in."""

from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl

# Okabe and Ito (2008), in an order whose neighbours also differ in lightness
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
MARKERS = ("o", "s", "^", "D", "v", "P")
INK = "#333333"
# monotone in lightness, readable under every common colour-blindness
HEAT = "cividis"
ONE_COLUMN = 3.4  # inches
TWO_COLUMNS = 7.0


def styled() -> AbstractContextManager[Any]:
    """Settings for one figure, undone afterwards; nothing global changes."""
    return mpl.rc_context(
        {
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": INK,
            "legend.frameon": False,
            "legend.fontsize": 8,
        }
    )
